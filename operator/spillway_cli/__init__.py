"""The `spillway` command: a thin shell over the domain and the trainer."""
