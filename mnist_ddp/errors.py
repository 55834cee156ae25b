"""The one exception type for what a user can put right."""


class UserError(ValueError):
    """A mistake in the input, the settings or the surroundings of a run.

    The message is one line that names the file, row and column or the flag, and says what to do.
    The program prints it as it is, without a traceback, and exits with status 2.
    """
