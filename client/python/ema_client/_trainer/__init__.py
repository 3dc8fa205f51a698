# SPDX-License-Identifier: Apache-2.0
"""What follows a training: `attach`, the pushes of its `Attachment`, and resuming."""
