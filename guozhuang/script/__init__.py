"""What a training script calls around its model: metrics over all ranks, output of one rank, accumulation, trackers."""
