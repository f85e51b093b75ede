"""Strings (arrays of objects)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


def _texts(values: Sequence[object], shape: tuple[int, ...]) -> np.ndarray:
    texts = np.empty(len(values), object)
    texts[:] = values
    return texts.reshape(shape)


@handles("StringConcat")
def concat(call: Call) -> Value:
    """Pairs joined, with broadcasting."""
    a, b = np.broadcast_arrays(as_array(call.get(0)), as_array(call.get(1)))
    return _texts(
        [str(x) + str(y) for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True)], a.shape
    )


@handles("StringSplit")
def split(call: Call) -> Value:
    """Pieces of each text, filled up with empty ones to the longest list; and how many there
    were."""
    x = as_array(call.get(0))
    delimiter, most = call.attr("delimiter") or None, int(call.attr("maxsplit", -1))
    rows = [str(v).split(delimiter, most) if v or delimiter else [] for v in x.reshape(-1)]
    width = max(map(len, rows), default=0)
    pieces = [p for row in rows for p in (*row, *[""] * (width - len(row)))]
    return _texts(pieces, (*x.shape, width)), np.asarray([len(r) for r in rows], np.int64).reshape(
        x.shape
    )


@handles("RegexFullMatch")
def match(call: Call) -> Value:
    """Whether each text as a whole matches a pattern."""
    x, pattern = as_array(call.get(0)), re.compile(call.attr("pattern"))
    return np.asarray([pattern.fullmatch(str(v)) is not None for v in x.reshape(-1)], bool).reshape(
        x.shape
    )


@handles("StringNormalizer")
def normalize(call: Call) -> Value:
    """Stop words removed, then case changed; an empty result holds one empty text."""
    x = as_array(call.get(0))
    action, exact = call.attr("case_change_action", "NONE"), bool(call.attr("is_case_sensitive", 0))
    fold = (lambda v: v) if exact else str.lower
    stop = {fold(s) for s in call.attr("stopwords", [])}
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(action, str)
    kept = [change(v) for v in x.reshape(-1).tolist() if fold(v) not in stop] or [""]
    return _texts(kept, (1, len(kept)) if x.ndim == 2 else (len(kept),))


@handles("TfIdfVectorizer")
def tf_idf(call: Call) -> Value:
    """Counts of n-grams of a pool, with up to `max_skip_count` elements skipped between; TF counts,
    IDF is the weight where present, TFIDF both."""
    x = as_array(call.get(0))
    low, high, skips = (
        int(call.attr(k)) for k in ("min_gram_length", "max_gram_length", "max_skip_count")
    )
    starts, places = call.attr("ngram_counts"), call.attr("ngram_indexes")
    pool: list[object] = list(call.attr("pool_strings") or call.attr("pool_int64s"))
    grams: dict[tuple[object, ...], int] = {}
    next_number = 0
    for n, first in enumerate(starts, 1):
        last = starts[n] if n < len(starts) else len(pool)
        for k in range(first, last, n):
            grams[tuple(pool[k : k + n])] = next_number
            next_number += 1
    weights = np.asarray(call.attr("weights") or [1.0] * len(grams), np.float32)
    rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[None]
    counts_of_rows = np.zeros((len(rows), max(places) + 1), np.float32)
    for counts, row in zip(counts_of_rows, rows.tolist(), strict=True):
        for n in range(low, high + 1):
            for skip in range(skips + 1 if n > 1 else 1):
                for k in range(len(row) - (n - 1) * (skip + 1)):
                    number = grams.get(tuple(row[k : k + 1 + (n - 1) * (skip + 1) : skip + 1]))
                    if number is not None:
                        counts[places[number]] += 1
    mode = call.attr("mode")
    if mode not in ("TF", "IDF", "TFIDF"):
        raise Refused(f"TfIdfVectorizer mode {mode}")
    scale = np.ones(counts_of_rows.shape[1], np.float32)
    scale[list(places)] = weights
    counts_of_rows = (
        counts_of_rows
        if mode == "TF"
        else (counts_of_rows > 0) * scale
        if mode == "IDF"
        else counts_of_rows * scale
    )
    return counts_of_rows if x.ndim > 1 else counts_of_rows[0]
