# SPDX-License-Identifier: Apache-2.0
"""The trainer's side: `attach`, the pushes of an `Attachment`, and resuming."""
