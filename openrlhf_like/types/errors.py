"""Errors that carry a meaning for the person at the keyboard."""


class UserError(Exception):
    """Something the user gave is wrong: the message is one line naming the flag or file, the value and the fix.

    Commands turn it into that one line on stderr and exit code 2. It is raised before Ray or a model is touched
    wherever the fault can be seen that early.
    """


class WaitTimeout(Exception):
    """A named wait passed its limit: the message says who waited for whom, for how long, and which flag changes it."""


class TrainingAborted(Exception):
    """The run cannot go on meaningfully (all groups filtered, too many reward failures): the message says why."""
