"""Strategies Zero1 to Zero3: DeepSpeed shards the model, our optimizer updates the shards."""
