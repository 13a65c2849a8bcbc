// Source file of the precompiled header; see cmake/pch.h.
