"""Engines that sample and train. Control flow, rewards and credit are the same on each."""
