"""A made-up job as exports of Nsight Systems."""
