"""Words that messages share."""


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 epoch", "2,000 epochs", "2 processes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"
