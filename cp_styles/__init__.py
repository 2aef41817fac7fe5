"""Context parallelism as ParallelStyles for parallelize_module: exact or loud."""
