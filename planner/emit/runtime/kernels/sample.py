"""Windows and samples of images, on local pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def lp_pool(x, p, kernel, strides, pads, dilations, out):
    """The p-norm of what is under each window of x [N, C, ...]; nothing where all of it is zero."""
    power = jnp.square(x) if p == 2 else jnp.abs(x) if p == 1 else jnp.abs(x) ** p
    total = sum(under_window(power, kernel, strides, pads, dilations, out, 0))
    if p == 1:
        return total
    safe_total = jnp.where(total == 0, 1, total)
    return jnp.where(
        total == 0, 0, jnp.sqrt(safe_total) if p == 2 else safe_total ** (1 / p)
    ).astype(x.dtype)


def under_window(x, kernel, strides, pads, dilations, out, fill):
    """What each tap of a window sees of x [N, C, ...], `fill` outside: one array [N, C, *out] per
    tap."""
    n = len(kernel)
    ends = [
        max(
            (out[k] - 1) * strides[k]
            + dilations[k] * (kernel[k] - 1)
            + 1
            - x.shape[2 + k]
            - pads[k],
            0,
        )
        for k in range(n)
    ]
    wide = jnp.pad(
        x, [(0, 0), (0, 0), *((pads[k], ends[k]) for k in range(n))], constant_values=fill
    )
    taps = []
    for tap in np.ndindex(*kernel):
        first = [tap[k] * dilations[k] for k in range(n)]
        last = [first[k] + (out[k] - 1) * strides[k] + 1 for k in range(n)]
        taps.append(lax.slice(wide, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *strides)))
    return taps


# Many parameters: the attributes of ONNX's MaxPool, and where the piece begins.
def max_pool_indices(
    x, kernel, strides, pads, dilations, out, sample, channel, channels, columns_first, dtype
):
    """Maxima under each window of x [N, C, ...] and where each is in the whole flat tensor, of
    which the piece's first sample and channel are given."""
    low = np.array(
        -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype
    )
    values = jnp.stack(under_window(x, kernel, strides, pads, dilations, out, low))
    sizes, places = x.shape[2:], []
    for tap in np.ndindex(*kernel):
        axes = [
            np.arange(out[k]) * strides[k] - pads[k] + tap[k] * dilations[k]
            for k in range(len(kernel))
        ]
        grid = [
            np.clip(g, 0, s - 1)
            for g, s in zip(np.meshgrid(*axes, indexing="ij"), sizes, strict=True)
        ]
        places.append(np.ravel_multi_index(grid, sizes, order="F" if columns_first else "C"))
    best = jnp.argmax(values, 0)
    maxima = jnp.take_along_axis(values, best[None], 0)[0]
    place = jnp.asarray(np.stack(places), dtype)[best, *np.indices(out)]
    row = jnp.arange(x.shape[0], dtype=dtype)[:, None] + sample
    plane = row * channels + jnp.arange(x.shape[1], dtype=dtype) + channel
    return maxima, place + (plane * int(np.prod(sizes))).reshape(
        *x.shape[:2], *[1] * len(sizes)
    ).astype(dtype)


def max_unpool(x, where, extents):
    """Values put back in their plane where a max pool found them; zeros elsewhere."""
    n, c = x.shape[:2]
    plane = int(np.prod(extents))
    flat = jnp.zeros((n, c, plane), x.dtype)
    index = (
        jnp.arange(n)[:, None, None],
        jnp.arange(c)[None, :, None],
        where.reshape(n, c, -1) % plane,
    )
    return flat.at[index].set(x.reshape(n, c, -1)).reshape(n, c, *extents)


def col2im(x, image, block, blocks, strides, pads, dilations):
    """Sliding blocks [N, C * block, blocks] added up into an image [N, C, ...]: the transpose of
    taking them apart."""
    n = len(image)
    columns = x.reshape(x.shape[0], -1, *block, *blocks)
    out = jnp.zeros(
        (*columns.shape[:2], *(image[k] + pads[k] + pads[n + k] for k in range(n))), x.dtype
    )
    for tap in np.ndindex(*block):
        where = tuple(
            slice(t * d, t * d + s * (b - 1) + 1, s)
            for t, d, s, b in zip(tap, dilations, strides, blocks, strict=True)
        )
        out = out.at[(slice(None), slice(None), *where)].add(
            columns[(slice(None), slice(None), *tap)]
        )
    return out[(slice(None), slice(None), *(slice(pads[k], pads[k] + image[k]) for k in range(n)))]


def reflected(position, low, high):
    """Positions folded back into [low, high]."""
    span = max(high - low, 1e-6)
    folded = jnp.mod(position - low, 2 * span)
    return low + jnp.where(folded > span, 2 * span - folded, folded)


def pixels(x, index, padding, corners):
    """x [C, ...] at whole positions per spatial dim: [C, points...]; what lies outside is zero, the
    border, or reflected."""
    inside, clipped = True, []
    for position, n in zip(index, x.shape[1:], strict=True):
        if padding == "reflection":
            position = jnp.round(
                reflected(position, 0.0 if corners else -0.5, n - 1.0 if corners else n - 0.5)
            )
        inside = inside & (position >= 0) & (position < n)
        clipped.append(jnp.clip(position, 0, n - 1).astype(jnp.int32))
    values = x[(slice(None), *clipped)]
    return jnp.where(inside, values, 0) if padding == "zeros" else values


def grid_sample(x, grid, mode, padding, corners):
    """x [N, C, ...] at the positions of a grid [N, points..., dims], -1 and 1 being the ends; the
    grid's last dim runs from the innermost dim out."""
    sizes, slope = x.shape[2:], -0.75
    wide = grid.astype(jnp.promote_types(grid.dtype, jnp.float32))

    def near(d):
        return ((slope + 2) * d - (slope + 3)) * d * d + 1

    def far(d):
        return ((slope * d - 5 * slope) * d + 8 * slope) * d - 4 * slope

    def one(image, points):
        places = []
        for size, g in zip(sizes, jnp.moveaxis(points, -1, 0)[::-1], strict=True):
            position = (g + 1) / 2 * (size - 1) if corners else ((g + 1) * size - 1) / 2
            if padding == "border":
                position = jnp.clip(position, 0, size - 1)
            elif padding == "reflection":
                position = reflected(
                    position, 0.0 if corners else -0.5, size - 1.0 if corners else size - 0.5
                )
            places.append(position)
        if mode == "nearest":
            return pixels(image, [jnp.round(position) for position in places], padding, corners)
        first = [lax.stop_gradient(jnp.floor(position)) for position in places]
        parts = [position - low for position, low in zip(places, first, strict=True)]
        taps = [
            [1 - t, t] if mode == "linear" else [far(t + 1), near(t), near(1 - t), far(2 - t)]
            for t in parts
        ]
        before, total = 0 if mode == "linear" else 1, 0
        for chosen in np.ndindex(*map(len, taps)):
            weight = 1
            for k, tap in enumerate(chosen):
                weight = weight * taps[k][tap]
            total = total + weight * pixels(
                image,
                [low + tap - before for low, tap in zip(first, chosen, strict=True)],
                padding,
                corners,
            )
        return total

    return jax.vmap(one)(x, wide).astype(x.dtype)


def roi_align(x, regions, images, cells, scale, ratio, half_pixel, most):
    """Averages (or maxima) of bilinear samples, `ratio` by `ratio` per cell, over each region (x0,
    y0, x1, y1) of one of the images x [N, C, H, W]."""
    shift = 0.5 if half_pixel else 0.0

    def corners(start, length, count, size):
        position = start + (jnp.arange(count)[:, None] + (jnp.arange(ratio) + 0.5) / ratio) * (
            length / count
        )
        outside = (position < -1) | (position > size)
        position = jnp.clip(position, 0, size - 1)
        low = lax.stop_gradient(jnp.floor(position))
        part, index = position - low, low.astype(jnp.int32)
        return [
            (jnp.where(outside, 0, 1 - part), index),
            (jnp.where(outside, 0, part), jnp.minimum(index + 1, size - 1)),
        ]

    def one(region, image):
        left, top, right, bottom = (
            region.astype(jnp.promote_types(region.dtype, jnp.float32)) * scale - shift
        )
        width, height = right - left, bottom - top
        if not half_pixel:
            width, height = jnp.maximum(width, 1.0), jnp.maximum(height, 1.0)
        ys, xs = (
            corners(top, height, cells[0], x.shape[2]),
            corners(left, width, cells[1], x.shape[3]),
        )
        one_image = x[image]
        parts = [
            one_image[:, iy][:, :, :, ix] * (wy[:, :, None, None] * wx)
            for wy, iy in ys
            for wx, ix in xs
        ]
        if not most:
            return jnp.mean(sum(parts), (2, 4))
        return jnp.max(
            jnp.stack(parts), (0, 3, 5)
        )  # the maximum is over weighted neighbours, as ONNX defines it

    return jax.vmap(one)(regions, images.astype(jnp.int32)).astype(x.dtype)


def max_roi_pool(x, regions, cells, scale):
    """Maxima in the cells of a grid over regions (image, x0, y0, x1, y1) rounded to whole pixels;
    empty cells are zero."""

    def within(first, last, count, size):
        step = jnp.maximum(last - first + 1, 1) / count
        k = jnp.arange(count)
        low, high = (
            jnp.clip(edge + first, 0, size)
            for edge in (jnp.floor(k * step), jnp.ceil((k + 1) * step))
        )
        index = jnp.arange(size)
        return (index >= low[:, None]) & (index < high[:, None])

    def one(region):
        left, top, right, bottom = jnp.floor(region[1:] * scale + 0.5)
        rows, columns = (
            within(top, bottom, cells[0], x.shape[2]),
            within(left, right, cells[1], x.shape[3]),
        )
        one_image = x[region[0].astype(jnp.int32)]
        tall = jnp.max(jnp.where(rows[:, None, :, None], one_image, -jnp.inf), 2)
        maxima = jnp.max(jnp.where(columns[:, None, None, :], tall, -jnp.inf), 3)
        return jnp.where(jnp.isneginf(maxima), 0, maxima).transpose(2, 1, 0)

    return jax.vmap(one)(regions).astype(x.dtype)


# Many parameters: the operands and attributes of ONNX's DeformConv.
def deform_conv(x, w, offset, mask, strides, pads, dilations, row, column):
    """Convolution whose taps are moved by offsets [N, groups * taps * 2, R, S], read bilinearly
    (zero outside) and scaled by a mask; the piece of the result begins at the given row and column.
    x [N, C, H, W], w [O, C / groups, ...]."""
    n, channels = x.shape[:2]
    kernel, (rows, columns) = w.shape[2:], offset.shape[2:]
    taps = kernel[0] * kernel[1]
    moved, groups = offset.shape[1] // (2 * taps), channels // w.shape[1]
    shift = offset.reshape(n, moved, taps, 2, rows, columns)
    i, j = (t.reshape(-1, 1, 1) for t in np.indices(kernel))
    y = (
        ((jnp.arange(rows) + row) * strides[0] - pads[0])[:, None]
        + i * dilations[0]
        + shift[:, :, :, 0]
    )
    z = (
        ((jnp.arange(columns) + column) * strides[1] - pads[1])[None]
        + j * dilations[1]
        + shift[:, :, :, 1]
    )
    low_y, low_z = lax.stop_gradient(jnp.floor(y)), lax.stop_gradient(jnp.floor(z))
    images = x.reshape(n, moved, channels // moved, *x.shape[2:])
    read = jax.vmap(jax.vmap(lambda image, a, b: image[:, a, b]))
    total = jnp.zeros(())
    for dy, dz in np.ndindex(2, 2):
        iy, iz = low_y + dy, low_z + dz
        inside = (iy >= 0) & (iy < x.shape[2]) & (iz >= 0) & (iz < x.shape[3])
        weight = jnp.where(inside, (1 - jnp.abs(y - iy)) * (1 - jnp.abs(z - iz)), 0)
        corner = [
            jnp.clip(v, 0, size - 1).astype(jnp.int32)
            for v, size in ((iy, x.shape[2]), (iz, x.shape[3]))
        ]
        total = total + read(images, *corner) * weight[:, :, None]
    if mask is not None:
        total = total * mask.reshape(n, moved, 1, taps, rows, columns)
    patches = total.astype(x.dtype).reshape(n, groups, channels // groups, taps, rows, columns)
    filters = w.reshape(groups, w.shape[0] // groups, channels // groups, taps)
    return jnp.einsum("ngctrs,goct->ngors", patches, filters).reshape(n, w.shape[0], rows, columns)
