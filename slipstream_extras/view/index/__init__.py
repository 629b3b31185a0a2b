"""The viewer's own index of a run: the columns that lists are filtered and sorted by, the steps, and the words of all texts.

Guarantee: It lies in the user's cache, can be deleted at any time, and is built in the background from where it stopped. The
journal is read in short statements. The command line and the pages may enter.
"""
