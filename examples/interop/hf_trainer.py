"""Hugging Face's Trainer in a job. It stops after a step and resumes there, exactly.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/interop/hf_trainer.py

- Output: `output_dir` is the run directory. Its checkpoints are folders checkpoint-STEP there.
- Requeue: by the batch script, at status 75. `enable_jit_checkpoint=True` would save at TERM, but not at USR1, and the
  script would end with status 0: no requeue.
- On resume the Trainer skips the batches that are done.
- Without a GPU say `use_cpu=True`: otherwise each rank silently trains alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from stop_flag import StopFlag, run_dir
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Model(torch.nn.Module):
    """A linear model that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and outputs of a batch."""
        outputs = self.linear(inputs)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}


class StopAfterStep(TrainerCallback):  # type: ignore[misc]  # without transformers it is Any
    """Lets the Trainer save and stop when the job is told to stop."""

    def __init__(self) -> None:
        self.flag, self.has_stopped = StopFlag(), False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """After the step."""
        if self.flag.agreed(args.device):
            self.has_stopped = control.should_save = control.should_training_stop = True


def main() -> None:
    """Train, from where it was stopped."""
    set_seed(1)
    inputs = torch.randn(640, 8)
    dataset = [{"inputs": one, "labels": one.sum(0, keepdim=True)} for one in inputs]
    arguments = TrainingArguments(
        str(run_dir()),
        per_device_train_batch_size=16,
        num_train_epochs=2,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    model, stop = Model(), StopAfterStep()
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[stop])
    newest = get_last_checkpoint(str(run_dir()))
    trainer.train(resume_from_checkpoint=newest)
    step, is_main = trainer.state.global_step, trainer.is_world_process_zero()
    if is_main and newest:
        print(f"Resumed from {newest}")
    if stop.has_stopped:
        if is_main:
            print(f"Stopped after step {step}")
        stop.flag.end()
    if is_main:
        print(f"Done: {step} steps, weights {model.linear.weight.sum().item():.9f}")


if __name__ == "__main__":
    main()
