// Holds the precompiled header; see cmake/pch.h.
