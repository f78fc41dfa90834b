"""What can go wrong with a graph or a program, and with the device that runs it.

Exceptions:
    CompileError                 a graph that can't become a program, or a stage's result that breaks an invariant
    RequestError                 a request that the device has no room for, or that contradicts itself
    DeviceError                  the machine can't run a program, or stopped running it; another backend may
        NoDeviceError            no GPU, no driver, no package that reaches it, or a GPU that lacks what is needed
        CompilerMissingError     no NVRTC
        KernelCompileError       NVRTC refused the kernel
        WrongProgramError        a program for another GPU
        OutOfDeviceMemoryError   what a program needs does not fit
        DriverError              a call of the driver failed: the device may be gone
        SelfTestError            the compiled kernel computes something else than the reference
        FaultError               the kernel gave up, and so did the fallback
    InterpreterError             a program that does what no program may
        BadWordError             a word of a record that no instruction has
        OutOfBoundsError         an access past the end of a buffer
        TapeError                a warp used more or fewer tiles than are laid out for it
        UninitialisedError       a read of what nobody has written
        RaceError                a word was, or might have been, overwritten while somebody still had to read it
        DeadlockError            everybody waits
        DivergenceError          SMs came to different ends of the same step

Knows no stage.
"""


class CompileError(ValueError):
    """``stage`` names the compiler's stage, ``node`` what it was looking at, ``rule`` what must hold and does not."""

    def __init__(self, stage: str, node: object, rule: str) -> None:
        super().__init__(f"{stage}: {node}: {rule}")
        self.stage = stage
        self.node = node
        self.rule = rule


class RequestError(ValueError):
    """Says which number of the request is out of its range, and the range."""


class DeviceError(RuntimeError):
    """Caught by whoever has another backend to go on with."""


class NoDeviceError(DeviceError):
    """Says what was looked for and what is missing."""


class CompilerMissingError(DeviceError):
    """NVRTC is not installed."""


class KernelCompileError(DeviceError):
    """The compiler's own words are in the message."""


class WrongProgramError(DeviceError):
    """The program was made for another GPU than this one."""


class OutOfDeviceMemoryError(DeviceError):
    """Says how much was asked for, and for what."""


class DriverError(DeviceError):
    """``code`` is the driver's name of the error: CUDA_ERROR_..."""

    def __init__(self, call: str, code: str, description: str) -> None:
        super().__init__(f"{call} failed with {code}: {description}")
        self.code = code


class SelfTestError(DeviceError):
    """Says where the results begin to differ."""


class FaultError(DeviceError):
    """Says what kind of fault it was, on which SM, in which task, at which epoch."""


class InterpreterError(RuntimeError):
    """Says which SM, which phase, and which word, tile or rule."""


class BadWordError(InterpreterError):
    """No instruction has this word."""


class OutOfBoundsError(InterpreterError):
    """Past the end of a buffer."""


class TapeError(InterpreterError):
    """More or fewer tiles than are laid out."""


class UninitialisedError(InterpreterError):
    """Nobody has written what was read."""


class RaceError(InterpreterError):
    """Nothing orders a write behind a read, or behind another write."""


class DeadlockError(InterpreterError):
    """Everybody waits."""


class DivergenceError(InterpreterError):
    """SMs that should have come to the same slots and rows did not."""
