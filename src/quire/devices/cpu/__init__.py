"""The device "native": the extension's kernels on this machine's processor and memory."""
