"""Imports optimizer states from other programs' checkpoints, and exports them (docs/checkpoints.md, ADR 11).

    foreign.py        what any such checkpoint holds, and how its files are read without running what is in them
    zero.py           DeepSpeed ZeRO 1, 2, 3    in
    universal.py      DeepSpeed universal       in, out
    distributed.py    DCP, torch's own          in, out
    naming.py         our names of parameters, and theirs
    importing.py      foreign checkpoint -> first checkpoint of a run
    exporting.py      our checkpoint -> foreign directory
    export.py         our checkpoint's weights -> Hugging Face directory

Neither DeepSpeed nor its classes are imported, only torch.
"""
