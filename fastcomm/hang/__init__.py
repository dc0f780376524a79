"""Why a job hangs: who is waited for, in which collective, and what shows it."""
