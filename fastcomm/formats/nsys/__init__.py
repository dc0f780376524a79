"""Read exports of Nsight Systems."""
