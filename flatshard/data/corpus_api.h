#pragma once

#include <cstdint>

// C interface of the dataset writer: the library _corpus.so of the Python
// package, loaded by python/flatshard/_data/core.py. A function that fails
// returns 0 or null, and flatshard_error() returns the text of the error.

extern "C" {

/// Returns the error of the last call of this thread that failed: "io error:
/// cannot open ...".
const char* flatshard_error();

/// Returns the hash of what `hash` is of, and then of bytes.
std::uint64_t
flatshard_mix(std::uint64_t hash, const void* bytes, std::int64_t nbytes);
/// Returns a number in [0, 1) that depends only on the name of a document.
/// Documents below a fraction belong to the validation split.
double flatshard_draw(const char* name, std::int64_t nbytes);

/// find_tokenizer, and printable without lines. The text is valid until the
/// next call of one of them in this thread.
const char* flatshard_find_tokenizer(const char* path);
const char* flatshard_printable(const char* text, std::int64_t nbytes);

/// StagedFolder::check.
int flatshard_check_output(const char* output, int force);

/// Creates a dataset writer.
/// @param tokenizer  a tokenizer.json, see copy_tokenizer; or "".
/// @param settings  JSON: the integers vocab_size, end_of_document,
///   begin_of_document (null: none) and shard_tokens, the texts tokenizer and
///   input_hash (of CorpusMeta), and the truth values force, masked and
///   has_validation.
void* flatshard_corpus_open(
    const char* output,
    const char* tokenizer,
    const char* settings);
/// Appends a document, with the tokens around it.
/// @param tokens  [count] little-endian integers of `nbytes` (1, 2, 4, 8), each
///   in [0, vocab_size).
/// @param mask  [count], 1 where a token is trained; null: there is none.
/// @param trains_end  of the end-of-document token.
int flatshard_corpus_add(
    void* corpus,
    int to_validation,
    const void* tokens,
    int nbytes,
    std::int64_t count,
    const std::uint8_t* mask,
    int trains_end);
/// Moves the dataset to its final path. @return the content of meta.json, valid
/// until the writer is closed.
const char* flatshard_corpus_commit(void* corpus);
/// Returns the `summary` of a committed dataset, valid until the writer is
/// closed.
const char* flatshard_corpus_summary(void* corpus);
/// Closes the writer. A dataset that was not committed is removed.
void flatshard_corpus_close(void* corpus);
}
