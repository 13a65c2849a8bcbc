#pragma once

#include <cstdint>

// The writer of corpora for other languages: the library _corpus.so of the
// Python package, which python/flatshard/_data/core.py loads. A function that
// fails returns 0 or null, and flatshard_error() has the text.

extern "C" {

/// Returns the error of the last call of this thread that failed: "io error:
/// cannot open ...".
const char* flatshard_error();

/// Returns the hash of what `hash` is of, and then of bytes.
std::uint64_t
flatshard_mix(std::uint64_t hash, const void* bytes, std::int64_t nbytes);
/// Returns a number in [0, 1) of a document's name alone. Validation has the
/// documents below a fraction.
double flatshard_draw(const char* name, std::int64_t nbytes);

/// find_tokenizer, and printable without lines. The text is valid until the
/// next call of one of them in this thread.
const char* flatshard_find_tokenizer(const char* path);
const char* flatshard_printable(const char* text, std::int64_t nbytes);

/// StagedFolder::check.
int flatshard_check_output(const char* output, int force);

/// Begins a corpus.
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
/// Puts the corpus in its place. @return the content of meta.json, valid until
/// the corpus is closed.
const char* flatshard_corpus_commit(void* corpus);
/// Returns the `summary` of a corpus that is committed, valid until the corpus
/// is closed.
const char* flatshard_corpus_summary(void* corpus);
/// Ends the corpus; what was not committed is removed.
void flatshard_corpus_close(void* corpus);
}
