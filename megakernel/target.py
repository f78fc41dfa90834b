"""A GPU as a row of data: what a program is made for.

Knows sizes that decide how work is cut and laid out. Does not know how to find the GPU of this machine (``runtime.py``
does) and nothing about models.
"""

from dataclasses import dataclass

from .isa import LOOP_WARPS, MAX_ROWS, TILE_BYTES, X_ROW_PAD_BYTES

X_CHUNK_ELEMENTS = 1280  # of one row of activations that shared memory holds at MAX_ROWS; fewer rows hold more
SUMS_BYTES = 16384  # partial sums of the warps, attention's scratch with the activations' part
MISC_BYTES = 16384  # records, rows, statistics, the residual stream; a program with more takes it from the ring
MIN_RING_TILES = 2
# More does harm: what shared memory leaves is the L1, and the kernel needs one (measured on an H200: README.md).
MAX_RING_TILES = 15


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of GPU. ``shared_bytes`` is what a block may opt in to, ``max_rows`` the rows of a step."""

    name: str
    arch: str  # as NVRTC spells it: sm_90a
    n_sms: int
    shared_bytes: int
    max_rows: int = MAX_ROWS
    bandwidth_gb_s: int | None = None  # what a stream over all SMs reaches; for predictions alone

    def __post_init__(self) -> None:
        if self.n_sms < 1 or self.max_rows not in (8, MAX_ROWS):
            raise ValueError(f"{self.name}: {self.n_sms} SMs and {self.max_rows} rows; at least 1 and 8 or {MAX_ROWS}")
        if self.ring_tiles() < MIN_RING_TILES:
            raise ValueError(f"{self.name}: {self.shared_bytes} bytes of shared memory leave no room for the ring")

    @property
    def x_bytes(self) -> int:
        """Shared memory for the rows of activations."""
        return self.max_rows * (X_CHUNK_ELEMENTS * 2 + X_ROW_PAD_BYTES)

    def ring_tiles(self, misc_bytes: int = MISC_BYTES) -> int:
        """How many tiles each warp of the token loop loads ahead, beside so many bytes of records and rows."""
        room_bytes = self.shared_bytes - self.x_bytes - SUMS_BYTES - misc_bytes
        return min(MAX_RING_TILES, room_bytes // (LOOP_WARPS * TILE_BYTES))


# Bandwidths are 0.9 of the data sheets', as measured on an H200 (copy 4.16, stream 4.3 TB/s of 4.8).
KNOWN = (
    Target("NVIDIA A100", "sm_80", 108, 166_912, bandwidth_gb_s=1_835),
    Target("NVIDIA A10", "sm_86", 72, 101_376, max_rows=8, bandwidth_gb_s=540),
    Target("NVIDIA L4", "sm_89", 58, 101_376, max_rows=8, bandwidth_gb_s=270),
    Target("NVIDIA H200", "sm_90a", 132, 232_448, bandwidth_gb_s=4_300),
    Target("NVIDIA B200", "sm_100a", 148, 232_448, bandwidth_gb_s=7_200),
    Target("NVIDIA GeForce RTX 5090", "sm_120", 170, 101_376, max_rows=8, bandwidth_gb_s=1_610),
)
