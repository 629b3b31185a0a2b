"""One GPU for the trainer and the producers beside it, in turns (`pipeline.gpu: turns`).

Guarantee: the trainer uses the GPU only while every producer that shares it says that its engine sleeps, or is gone. Whoever
dies, the other side goes on, or ends and says whom it waited for. Intake, training and the wiring may enter.
"""
