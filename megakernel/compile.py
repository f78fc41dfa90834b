"""The stages in a row: graph → fused ops → phases → schedule → addresses → program.

Knows the order. Decides nothing itself, and does no I/O: whoever wants to read the stages passes ``trace``.
"""

from collections.abc import Callable, Sequence

from . import fuse as fuse_stage
from . import graph as graph_stage
from . import memory as memory_stage
from . import predict as predict_stage
from . import program as program_stage
from . import schedule as schedule_stage
from . import tasks as tasks_stage
from .graph import Graph, Sizes
from .ops import FusedOp
from .program import Program
from .target import Target

Trace = Callable[[str, str], None]  # a stage's name and its result as text


def compile_program(graph: Graph, target: Target, *, trace: Trace | None = None) -> Program:
    """The program of one step of ``graph`` on ``target``. Raises CompileError with stage, node and rule."""
    ops = fuse_stage.fuse(graph)
    if trace is not None:
        trace("graph", graph_stage.dump(graph))
        trace("fused", fuse_stage.dump(ops))
    return compile_ops(graph.name, ops, graph.sizes, target, trace=trace)


def compile_ops(
    name: str, ops: Sequence[FusedOp], sizes: Sizes, target: Target, *, trace: Trace | None = None
) -> Program:
    """The same from fused ops on."""
    phases = tasks_stage.split_into_tasks(ops, sizes)
    schedule = schedule_stage.assign_to_sms(phases, target)
    memory = memory_stage.lay_out(phases, schedule, target, sizes)
    program = program_stage.encode(name, ops, phases, schedule, memory, target, sizes)
    if trace is not None:
        trace("tasks", tasks_stage.dump(phases))
        trace("schedule", schedule_stage.dump(schedule, phases))
        trace("memory", memory_stage.dump(memory, phases, target))
        trace("program", program_stage.dump(program) + "\n" + predict_stage.dump(predict_stage.predict(program)))
    return program
