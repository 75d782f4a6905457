"""The C kernels of the codes."""

def code(
    kind: int,
    task: int,
    rows: tuple[int, int],
    codes: tuple[int, int],
    lost: tuple[int, int],
    num_rows: int,
    length: int,
    blocks: tuple[int, int, int, int],
    /,
) -> None: ...
