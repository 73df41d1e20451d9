# mypy: ignore-errors
# Triton reads these functions as its own language, which Python's types do not describe.
"""GPU kernels of a stacked MLP with two hidden layers: forward in one launch, backward in one.

Shapes: G networks side by side, B batch, I inputs, H1 and H2 hidden, O outputs.  `SHARED` networks
in a row read the same inputs.  All tensors are contiguous; sizes that are not powers of two are
masked.  Nothing is added atomically, so results repeat bit-exactly: what several programs
contribute to is stored in parts, which the caller adds up.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def _operand(a, PRECISION: tl.constexpr):
    """What a product reads of `a`."""
    if PRECISION == "bf16":
        result = a.to(tl.bfloat16)
    elif PRECISION == "rounded":
        # For Triton's interpreter, which truncates to bfloat16 and multiplies its bits as integers.
        bits = a.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = a
    return result


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """`total + a @ b` with single-precision sums."""
    a, b = _operand(a, PRECISION), _operand(b, PRECISION)
    if PRECISION == "bf16" or PRECISION == "rounded":
        result = tl.dot(a, b, total)
    else:
        result = tl.dot(a, b, total, input_precision=PRECISION)
    return result


@triton.jit
def _relu(a):
    """Keep not-a-number as it is, so that a diverged network shows."""
    return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _load(matrix, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Tile `matrix[rows, columns]` of `[HEIGHT, WIDTH]`, zero outside; either index may be the row.

    With `rows` as `[:, None]` and `columns` as `[None, :]` the tile is upright, the other way
    round it comes transposed.
    """
    return tl.load(
        matrix + rows * WIDTH + columns, mask=(rows < HEIGHT) & (columns < WIDTH), other=0.0
    )


@triton.jit
def _store(matrix, rows, columns, tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Write `tile` to `matrix[rows, columns]`, in the type of the matrix."""
    mask = (rows < HEIGHT) & (columns < WIDTH)
    tl.store(matrix + rows * WIDTH + columns, tile.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    x,  # [G / SHARED, B, I]
    w1,  # [G, I, H1]
    b1,  # [G, H1]
    w2,  # [G, H1, H2]
    b2,  # [G, H2]
    w3,  # [G, H2, O]
    b3,  # [G, O]
    h1,  # [G, B, H1], written if SAVE
    h2,  # [G, B, H2], written if SAVE
    out,  # [G, parts, B, O]
    B: tl.constexpr,
    I: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_I: tl.constexpr,
    PADDED_O: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: ROWS of the batch and COLUMNS of the second hidden layer of one network.

    The first layer is narrow, so that every program computes it itself, DEPTH units at a time.
    """
    parts: tl.constexpr = (H2 + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = (B + ROWS - 1) // ROWS
    program = tl.program_id(0)
    part = program % parts
    g = (program // (parts * blocks)).to(tl.int64)
    rows = (program // parts % blocks * ROWS + tl.arange(0, ROWS))[:, None]
    units = part * COLUMNS + tl.arange(0, COLUMNS)
    x_tile = _load(x + g // SHARED * B * I, rows, tl.arange(0, PADDED_I)[None, :], B, I)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H1, DEPTH):
        k = start + tl.arange(0, DEPTH)
        w1_tile = _load(w1 + g * I * H1, tl.arange(0, PADDED_I)[:, None], k[None, :], I, H1)
        bias = tl.load(b1 + g * H1 + k, mask=k < H1, other=0.0)
        hidden = _dot(x_tile, w1_tile, tl.zeros((ROWS, DEPTH), tl.float32), PRECISION)
        hidden = _operand(_relu(hidden + bias[None, :]), PRECISION)
        if SAVE:
            # The programs of one row block share the work of storing what all of them know.
            mine = tl.where(start // DEPTH % parts == part, rows, B)
            _store(h1 + g * B * H1, mine, k[None, :], hidden, B, H1)
        w2_tile = _load(w2 + g * H1 * H2, k[:, None], units[None, :], H1, H2)
        total = _dot(hidden, w2_tile, total, PRECISION)
    bias = tl.load(b2 + g * H2 + units, mask=units < H2, other=0.0)
    hidden = _operand(_relu(total + bias[None, :]), PRECISION)
    if SAVE:
        _store(h2 + g * B * H2, rows, units[None, :], hidden, B, H2)
    out += (g * parts + part) * B * O
    if O == 1:
        w3_tile = tl.load(w3 + g * H2 + units, mask=units < H2, other=0.0)
        q = tl.sum(hidden * w3_tile[None, :], 1)[:, None]
        q += tl.where(part == 0, tl.load(b3 + g), 0.0)
        _store(out, rows, tl.zeros((1, 1), tl.int32), q, B, 1)
    else:
        o = tl.arange(0, PADDED_O)
        w3_tile = _load(w3 + g * H2 * O, units[:, None], o[None, :], H2, O)
        bias = tl.load(b3 + g * O + o, mask=o < tl.where(part == 0, O, 0), other=0.0)
        q = _dot(hidden, w3_tile, tl.zeros((ROWS, PADDED_O), tl.float32), PRECISION)
        _store(out, rows, o[None, :], q + bias[None, :], B, O)


@triton.jit
def _output_gradient(dout, g, rows, B: tl.constexpr, O: tl.constexpr, PADDED_O: tl.constexpr):
    """Rows of the gradient of the output, `[ROWS, PADDED_O]`, or `[ROWS, 1]` for one output."""
    if O == 1:
        tile = _load(dout + g * B, rows, tl.zeros((1, 1), tl.int32), B, 1)
    else:
        tile = _load(dout + g * B * O, rows, tl.arange(0, PADDED_O)[None, :], B, O)
    return tile


@triton.jit
def _second_gradient(
    dout_tile,
    h2_tile,
    w3,
    g,
    units,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient before the second activation; so cheap that no program stores it for another."""
    if O == 1:
        w3_tile = tl.load(w3 + g * H2 + units, mask=units < H2, other=0.0)
        gradient = dout_tile * w3_tile[None, :]
    else:
        o = tl.arange(0, PADDED_O)
        w3_tile = _load(w3 + g * H2 * O, units[None, :], o[:, None], H2, O)
        zero = tl.zeros(h2_tile.shape, tl.float32)
        gradient = _dot(dout_tile, w3_tile, zero, PRECISION)
    return tl.where(h2_tile <= 0, 0.0, gradient)


@triton.jit
def _first_layer(
    dout,
    x,
    w1,
    w2,
    w3,
    h1,
    h2,
    dx,  # [G, parts of H1, B, I]
    dw1,  # [G, row blocks, I, H1]
    db1,  # [G, row blocks, H1]
    g,
    block,
    part,
    B: tl.constexpr,
    I: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_I: tl.constexpr,
    PADDED_O: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients through COLUMNS units of the first hidden layer, for one of BLOCKS row blocks."""
    parts: tl.constexpr = (H1 + COLUMNS - 1) // COLUMNS
    steps: tl.constexpr = (B + ROWS * BLOCKS - 1) // (ROWS * BLOCKS)
    units = part * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, PADDED_I)
    w1_total = tl.zeros((PADDED_I, COLUMNS), tl.float32)
    b1_total = tl.zeros((COLUMNS,), tl.float32)
    for step in range(steps):
        row = (block * steps + step) * ROWS + tl.arange(0, ROWS)
        rows = row[:, None]
        dout_tile = _output_gradient(dout, g, rows, B, O, PADDED_O)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, H2, DEPTH):
            k = start + tl.arange(0, DEPTH)
            h2_tile = _load(h2 + g * B * H2, rows, k[None, :], B, H2)
            dh2 = _second_gradient(dout_tile, h2_tile, w3, g, k, H2, O, PADDED_O, PRECISION)
            w2_tile = _load(w2 + g * H1 * H2, units[None, :], k[:, None], H1, H2)
            total = _dot(dh2, w2_tile, total, PRECISION)
        h1_tile = _load(h1 + g * B * H1, rows, units[None, :], B, H1)
        dh1 = tl.where(h1_tile <= 0, 0.0, total)
        if NEED_X:
            w1_tile = _load(w1 + g * I * H1, i[None, :], units[:, None], I, H1)
            dx_tile = _dot(dh1, w1_tile, tl.zeros((ROWS, PADDED_I), tl.float32), PRECISION)
            _store(dx + (g * parts + part) * B * I, rows, i[None, :], dx_tile, B, I)
        if NEED_W:
            x_tile = _load(x + g // SHARED * B * I, row[None, :], i[:, None], B, I)
            w1_total = _dot(x_tile, dh1, w1_total, PRECISION)
            b1_total += tl.sum(dh1, 0)
    if NEED_W:
        own = g * BLOCKS + block
        _store(dw1 + own * I * H1, i[:, None], units[None, :], w1_total, I, H1)
        tl.store(db1 + own * H1 + units, b1_total, mask=units < H1)


@triton.jit
def _middle_layer(
    dout,
    w3,
    h1,
    h2,
    dw2,  # [G, H1, H2]
    g,
    tile,
    B: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_O: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile `[HEIGHT, WIDTH]` of the gradient of the middle weights, over the whole batch."""
    across: tl.constexpr = (H2 + WIDTH - 1) // WIDTH
    left = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    right = tile % across * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(0, B, DEPTH):
        row = start + tl.arange(0, DEPTH)
        dout_tile = _output_gradient(dout, g, row[:, None], B, O, PADDED_O)
        h2_tile = _load(h2 + g * B * H2, row[:, None], right[None, :], B, H2)
        dh2 = _second_gradient(dout_tile, h2_tile, w3, g, right, H2, O, PADDED_O, PRECISION)
        h1_tile = _load(h1 + g * B * H1, row[None, :], left[:, None], B, H1)
        total = _dot(h1_tile, dh2, total, PRECISION)
    _store(dw2 + g * H1 * H2, left[:, None], right[None, :], total, H1, H2)


@triton.jit
def _last_layer(
    dout,
    w3,
    h2,
    db2,  # [G, H2]
    dw3,  # [G, H2, O]
    db3,  # [G, O]
    g,
    part,
    B: tl.constexpr,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_O: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of COLUMNS rows of the last weights and of the second and third biases."""
    padded: tl.constexpr = 1 if O == 1 else PADDED_O
    units = part * COLUMNS + tl.arange(0, COLUMNS)
    o = tl.arange(0, padded)
    b2_total = tl.zeros((COLUMNS,), tl.float32)
    w3_total = tl.zeros((COLUMNS, padded), tl.float32)
    b3_total = tl.zeros((padded,), tl.float32)
    for start in range(0, B, DEPTH):
        row = start + tl.arange(0, DEPTH)
        dout_tile = _output_gradient(dout, g, row[:, None], B, O, PADDED_O)
        h2_tile = _load(h2 + g * B * H2, row[:, None], units[None, :], B, H2)
        dh2 = _second_gradient(dout_tile, h2_tile, w3, g, units, H2, O, PADDED_O, PRECISION)
        b2_total += tl.sum(dh2, 0)
        b3_total += tl.sum(dout_tile, 0)
        if O == 1:
            w3_total += tl.sum(h2_tile * dout_tile, 0)[:, None]
        else:
            w3_total = _dot(tl.trans(h2_tile), dout_tile, w3_total, PRECISION)
    tl.store(db2 + g * H2 + units, b2_total, mask=units < H2)
    _store(dw3 + g * H2 * O, units[:, None], o[None, :], w3_total, H2, O)
    tl.store(db3 + g * O + o, b3_total, mask=o < tl.where(part == 0, O, 0))


@triton.jit
def backward_kernel(
    dout,  # [G, B, O]
    x,
    w1,
    w2,
    w3,
    h1,
    h2,
    dx,
    dw1,
    db1,
    dw2,
    db2,
    dw3,
    db3,
    B: tl.constexpr,
    I: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    O: tl.constexpr,
    PADDED_I: tl.constexpr,
    PADDED_O: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All gradients of one network, by programs of three kinds that do not wait for each other."""
    firsts: tl.constexpr = (H1 + COLUMNS - 1) // COLUMNS * BLOCKS
    across: tl.constexpr = (H2 + WIDTH - 1) // WIDTH
    middles: tl.constexpr = (H1 + HEIGHT - 1) // HEIGHT * across if NEED_W else 0
    lasts: tl.constexpr = across if NEED_W else 0
    g = (tl.program_id(0) // (firsts + middles + lasts)).to(tl.int64)
    role = tl.program_id(0) % (firsts + middles + lasts)
    if role < firsts:
        _first_layer(
            dout, x, w1, w2, w3, h1, h2, dx, dw1, db1, g, role % BLOCKS, role // BLOCKS,
            B, I, H1, H2, O, PADDED_I, PADDED_O, SHARED, ROWS, COLUMNS, DEPTH, BLOCKS,
            NEED_X, NEED_W, PRECISION,
        )  # fmt: skip
    if NEED_W:
        if (role >= firsts) & (role < firsts + middles):
            _middle_layer(
                dout, w3, h1, h2, dw2, g, role - firsts,
                B, H1, H2, O, PADDED_O, HEIGHT, WIDTH, TILE_DEPTH, PRECISION,
            )  # fmt: skip
        if role >= firsts + middles:
            _last_layer(
                dout, w3, h2, db2, dw3, db3, g, role - firsts - middles,
                B, H2, O, PADDED_O, WIDTH, TILE_DEPTH, PRECISION,
            )  # fmt: skip
