"""Log-probs and entropies of a group's tokens under the newest policy of the run, for those who ask for them.

Guarantee: torch and the model are loaded by a child process alone, one at a time, on the CPU, within a stated time and memory. No
code that comes with a model is run, and nothing is downloaded. The pages may read what was computed; the server asks.
"""
