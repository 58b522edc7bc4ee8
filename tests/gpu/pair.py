"""The group `gpu_pair`: two ranks on one GPU. `make test-gpu-pair`, or `python tests/gpu/run.py gpu_pair`.

Since version 2.30, NCCL lets two ranks share a GPU (seen with 2.31.2). With an older one, such as torch 2.11's,
two GPUs are needed.
"""

from __future__ import annotations

import several
from table import Test, both, each

TESTS: dict[str, Test] = {
    **each("weights_are_equal", several.weights_are_equal, "recipe", ("reference", "fast")),
    **each("last_batches_may_be_mixed", several.last_batches_may_be_mixed, "rest", several.RESTS),
    "deterministic_means_the_same_bits": several.deterministic_means_the_same_bits,
    **both("a_stopped_training_resumes_to_the_bit", several.a_stopped_training_resumes_to_the_bit),
    **each(
        "a_sharded_training_resumes_to_the_bit", several.a_sharded_training_resumes_to_the_bit, "strategy", ("fsdp",)
    ),
    **both("a_warning_stops_all", several.a_warning_stops_all),
    **both("an_exception_ends_all", several.an_exception_ends_all),
    **both("one_that_hangs_is_named", several.one_that_hangs_is_named),
    "a_rank_without_gpu_is_refused": several.a_rank_without_gpu_is_refused,
}
