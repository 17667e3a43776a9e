"""Several ranks: communication, cores near a device, and models sharded by FSDP2 or DeepSpeed (`deepspeed`).

`backward_exchange` sums gradients during backward where every rank has the whole model. `reduced_gradients` sums them
on the rank that owns them. `shards` is the optimizer of all ranks together. `run` shards the model of a TrainingJob.
Only `deepspeed.adopted` imports DeepSpeed, which takes seconds, at its top.
"""
