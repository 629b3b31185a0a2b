"""The TRL trainer and the loop around it: arguments, steps, callbacks, feeds, retraining.

Guarantee: A step is taken once, on exactly the batch that was cut, also when the process is killed in its middle. Only the
wiring and the daemon may enter.
"""
