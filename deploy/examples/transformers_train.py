# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer: a training whose average an EMA Server keeps, and which is evaluated with it.

Usage: transformers_train.py URL FOLDER
such as: transformers_train.py ema://localhost:50051/example /tmp/example
Saves checkpoints in FOLDER; called again, it goes on from the last one, and so does the average.
"""

import os
import sys

import torch
import transformers
from ema_client.transformers import EmaCallback


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    # Counts up from a random number.
    lines = [(torch.arange(16) + start) % 64 for start in torch.randint(64, (32,))]
    data = [{"input_ids": line, "labels": line} for line in lines]
    average = EmaCallback(url, half_life="10ba", evaluate_with_average=True)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[average],
    )
    trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(folder))
    own = trainer.evaluate()["eval_loss"]
    with average.averaged():
        averages = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: {own:.4f}, of the average {averages:.4f}")


if __name__ == "__main__":
    main()
