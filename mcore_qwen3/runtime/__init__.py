"""Devices, CPU stand-ins, process groups and seeds: the only package that names a device or backend to torch."""
