"""Arrow folders as MLCommons preprocesses them."""

import pyarrow as pa

ENCODINGS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}
Row = dict[str, object]


def schema(timestep=None, binary=None, without=()):
    kinds = {"__key__": pa.string()} | dict.fromkeys(ENCODINGS.values(), binary or pa.binary())
    kinds["timestep"] = timestep or pa.int32()
    return pa.schema({name: kind for name, kind in kinds.items() if name not in without})


def write_arrow(
    path,
    content,
    batches=None,
    kind=None,
    **options,
):
    """An arrow stream with batches of so many rows; None for one of all."""
    kind, begin = kind or schema(), 0
    batches = (len(content),) if batches is None else batches
    path.parent.mkdir(parents=True, exist_ok=True)
    assert sum(batches) == len(content)
    with pa.ipc.new_stream(str(path), kind, **options) as stream:
        for size in batches:
            stream.write_batch(pa.RecordBatch.from_pylist(content[begin : begin + size], schema=kind))
            begin += size
