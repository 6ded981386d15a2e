"""What every package uses: settings, errors, devices, processes, random streams, records of tensors."""
