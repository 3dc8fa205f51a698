# SPDX-License-Identifier: Apache-2.0
"""diffusers: a training with EMAModel, whose average an EMA Server keeps.

Usage: diffusers_train.py URL FOLDER
such as: diffusers_train.py ema://localhost:50051/example /tmp/example
Writes the averaged model to FOLDER at the end. Called again, it goes on with that average.
"""

import os
import sys

import diffusers
import torch

# In place of: from diffusers.training_utils import EMAModel
from ema_client.diffusers import EMAModel


def noise_loss(unet, schedule, images):
    noise = torch.randn_like(images)
    times = torch.randint(schedule.config.num_train_timesteps, (len(images),))
    noisy = schedule.add_noise(images, noise, times)
    return torch.nn.functional.mse_loss(unet(noisy, times).sample, noise)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, folder = sys.argv[1:]
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    schedule = diffusers.DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=0.001)
    ema = EMAModel(
        unet.parameters(),
        decay=0.99,
        model_cls=diffusers.UNet2DModel,
        model_config=unet.config,
        # What is new: the server, the parameters' names, and who changes them.
        url=url,
        model=unet,
        optimizer=optimizer,
    )
    if os.path.isdir(folder):
        ema.load_state_dict(EMAModel.from_pretrained(folder, diffusers.UNet2DModel).state_dict())
    images = torch.rand(32, 1, 8, 8)
    for batch in images.split(4) * 3:
        loss = noise_loss(unet, schedule, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step(unet.parameters())
    ema.store(unet.parameters())
    ema.copy_to(unet.parameters())
    with torch.no_grad():
        print(f"step {ema.optimization_step}: {noise_loss(unet, schedule, images):.4f}")
    ema.restore(unet.parameters())
    ema.save_pretrained(folder)
    ema.close()


if __name__ == "__main__":
    main()
