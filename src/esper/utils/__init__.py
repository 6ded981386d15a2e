"""What every room stands on: settings, errors, devices, random streams, tables, records of rows."""
