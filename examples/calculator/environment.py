"""The demo's environment, by the conventions of TRL's `environment_factory`: public methods are tools."""


class Calculator:
    """Tool that multiplies, which the model cannot do by itself."""

    def reset(self, **_: object) -> None:
        """Begins an episode. A calculator remembers nothing, and adds nothing to the prompt."""

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return int(a) * int(b)  # a text or a list times a number would take all memory
