"""Strategies Zero1, Zero2, Zero3, Fsdp: DeepSpeed or FSDP2 divides the model among ranks, our optimizer has the parts.

`layout` says which values of each parameter are whose, `reduced_gradients` adds gradients up where they belong,
`shards` is the optimizer of all ranks together, `adopted` takes an engine of DeepSpeed over, `run` makes one for a
TrainingJob, `support` refuses what is outside. Only `adopted` imports DeepSpeed, which takes seconds, at its top: it is
imported when such a strategy is asked for. `fsdp` divides by FSDP2, with `segment_gradients` and `gathered_segments`.
"""
