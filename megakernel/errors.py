"""What can be wrong with a graph or a program: the stage that noticed, the node, and the rule it breaks.

Exceptions:
    CompileError    a graph that can't become a program, or a stage's result that breaks an invariant

Knows no stage.
"""


class CompileError(ValueError):
    """``stage`` names the compiler's stage, ``node`` what it was looking at, ``rule`` what must hold and does not."""

    def __init__(self, stage: str, node: object, rule: str) -> None:
        super().__init__(f"{stage}: {node}: {rule}")
        self.stage = stage
        self.node = node
        self.rule = rule
