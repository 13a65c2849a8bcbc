// The part of fmt that is not a template, compiled once: header-only, it adds
// three seconds to each file that formats anything. torch's wheel has this fmt,
// with headers only.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
template locale_ref::locale_ref(const std::locale& locale);
template auto locale_ref::get<std::locale>() const -> std::locale;

namespace detail {
template auto dragonbox::to_decimal(float x) noexcept
    -> dragonbox::decimal_fp<float>;
template auto dragonbox::to_decimal(double x) noexcept
    -> dragonbox::decimal_fp<double>;
template auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl(locale_ref) -> char;
}  // namespace detail
FMT_END_NAMESPACE
