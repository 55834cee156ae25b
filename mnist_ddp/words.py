"""Words that messages share."""


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 epoch", "2,000 epochs"."""
    return f"{number:,} {noun}{'s'[: number != 1]}"
