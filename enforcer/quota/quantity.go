// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"fmt"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
)

const (
	kib = 1 << 10
	mib = 1 << 20

	// maxQuantity keeps every quantity, and the sum of any two, inside 64 bits, and apart from
	// Unlimited.
	maxQuantity = 1<<63 - 1

	// maxValueLen bounds what is parsed at all: the longest sensible per-GPU list is far below.
	maxValueLen = 4096
	// maxNumberLen bounds one number: 1 EiB in bytes with a fraction has fewer characters.
	maxNumberLen = 40

	// granule is what shares are rounded down to: the size in which drivers hand out memory.
	granule = 2 * mib

	// maxShareDen bounds the denominator of a share, so that its products fit.
	maxShareDen = 1_000_000_000
)

// AmountKind says how an [Amount] is written.
type AmountKind uint8

// The kinds of amounts.
const (
	KindNone      AmountKind = iota // not given
	KindBytes                       // 4Gi
	KindShare                       // 25%, 1/4: of allocatable
	KindUnlimited                   // max
)

// Amount is a quantity, a share of a GPU's allocatable bytes, or max.
type Amount struct {
	Kind     AmountKind
	Bytes    uint64 // of KindBytes
	Num, Den uint64 // of KindShare; Num <= Den
}

// Bytes makes an amount of b bytes.
func Bytes(b uint64) Amount { return Amount{Kind: KindBytes, Bytes: b} }

// Share makes an amount of num/den of allocatable; it is KindNone for a share that is not
// between 0 and 1.
func Share(num, den uint64) Amount {
	if den == 0 || den > maxShareDen || num > den {
		return Amount{}
	}
	return Amount{Kind: KindShare, Num: num, Den: den}
}

// On is the amount on a GPU with that many allocatable bytes: shares are rounded down to 2 MiB,
// so that shares which sum to the whole fit. KindNone counts as Unlimited.
func (a Amount) On(allocatable uint64) uint64 {
	switch a.Kind {
	case KindBytes:
		return a.Bytes
	case KindShare:
		if a.Den == 0 || a.Num >= a.Den {
			return allocatable / granule * granule
		}
		hi, lo := bits.Mul64(allocatable, a.Num)
		q, _ := bits.Div64(hi, lo, a.Den) // hi < Den, since Num < Den
		return q / granule * granule
	default:
		return Unlimited
	}
}

// String is the amount as a user could have written it.
func (a Amount) String() string {
	switch a.Kind {
	case KindBytes:
		return FormatBytes(a.Bytes)
	case KindShare:
		r := new(big.Rat).SetFrac(new(big.Int).SetUint64(a.Num*100), new(big.Int).SetUint64(a.Den))
		if digits, exact := r.FloatPrec(); a.Num == 1 && (!exact || digits > 2) {
			return "1/" + strconv.FormatUint(a.Den, 10)
		}
		s := r.FloatString(7)
		return strings.TrimRight(strings.TrimRight(s, "0"), ".") + "%"
	case KindUnlimited:
		return "max"
	default:
		return "none"
	}
}

// units are the multipliers of every suffix of Kubernetes' quantities that makes sense for bytes.
var units = map[string]uint64{
	"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}

// ParseQuantity reads a quantity of bytes in Kubernetes' notation, where everything but 0 has a
// unit. Whatever resource.ParseQuantity accepts without rounding, with a unit and at most 2^63-1,
// means the same here; that parser itself is not used since it rounds fractions up, caps what is
// too large, and takes 3000m for 3. The error is an [*Error] that quotes the value.
func ParseQuantity(s string) (uint64, error) {
	n, err := parseQuantity(strings.TrimSpace(s))
	if err != nil {
		return 0, err
	}
	return n, nil
}

func parseQuantity(s string) (uint64, *Error) {
	if s == "" {
		return 0, NewError(CodeBadQuantity, "is empty").WithHint("write a quantity such as 4Gi")
	}
	num, unit := splitNumber(s)
	if num == "" || num == "-" || num == "+" {
		return 0, NewError(CodeBadQuantity, "%s is not a quantity", Quote(s)).WithHint("write one such as 4Gi, or 25%%, or max")
	}
	if len(num) > maxNumberLen {
		return 0, NewError(CodeTooBig, "%s has more digits than a number of bytes can have", Quote(s)).WithHint("write one such as 4Gi")
	}
	if strings.HasPrefix(num, "-") {
		return 0, NewError(CodeNegative, "%s is negative", Quote(s)).WithHint("write %s", Quote(s[1:]))
	}
	num = strings.TrimPrefix(num, "+")
	r, ok := new(big.Rat).SetString(num)
	if !ok {
		return 0, NewError(CodeBadQuantity, "%s is not a quantity", Quote(s)).WithHint("write one such as 4Gi, or 25%%, or max")
	}
	if unit == "" {
		if r.Sign() == 0 {
			return 0, nil
		}
		return 0, NewError(CodeNoUnit, "%s has no unit", Quote(s)).WithHint("write %s", meantWithoutUnit(num, r))
	}
	mult, ok := units[unit]
	if !ok {
		return 0, unitError(s, num, unit)
	}
	r.Mul(r, new(big.Rat).SetInt(new(big.Int).SetUint64(mult)))
	if !r.IsInt() {
		whole := new(big.Int).Quo(r.Num(), r.Denom())
		hint := "write a whole number of bytes"
		if whole.IsUint64() && whole.Uint64() <= maxQuantity {
			hint = "write " + roundedForm(whole.Uint64())
		}
		return 0, NewError(CodeFraction, "%s is not a whole number of bytes", Quote(s)).WithHint("%s", hint)
	}
	if !r.Num().IsUint64() || r.Num().Uint64() > maxQuantity {
		return 0, NewError(CodeTooBig, "%s is more than %s bytes", Quote(s), strconv.FormatUint(maxQuantity, 10)).
			WithHint("write max for no limit")
	}
	return r.Num().Uint64(), nil
}

// splitNumber cuts s behind its sign, digits and points.
func splitNumber(s string) (num, unit string) {
	i := 0
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		i++
	}
	for i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] == '.') {
		i++
	}
	return s[:i], s[i:]
}

// unitError says which unit was probably meant.
func unitError(s, num, unit string) *Error {
	if unit[0] == 'e' || unit[0] == 'E' {
		// Kubernetes' decimal exponent: a number without a unit, for us.
		if exp, err := strconv.Atoi(unit[1:]); err == nil && exp >= 0 && exp <= 18 {
			if r, ok := new(big.Rat).SetString(num + "e" + strconv.Itoa(exp)); ok {
				return NewError(CodeNoUnit, "%s has no unit", Quote(s)).WithHint("write %s", meantWithoutUnit("", r))
			}
		}
	}
	meant := map[string]string{
		"m": "Mi", "K": "Ki", "g": "Gi", "t": "Ti", "p": "Pi",
		"KB": "k", "MB": "M", "GB": "G", "TB": "T", "PB": "P", "EB": "E",
		"KIB": "Ki", "MIB": "Mi", "GIB": "Gi", "TIB": "Ti", "PIB": "Pi", "EIB": "Ei",
		"KI": "Ki", "MI": "Mi", "GI": "Gi", "TI": "Ti", "PI": "Pi", "EI": "Ei",
	}
	trimmed := strings.TrimSpace(unit)
	m, ok := meant[trimmed]
	if !ok {
		if _, isUnit := units[trimmed]; isUnit {
			m = trimmed // only a blank between number and unit
		} else if m, ok = meant[strings.ToUpper(trimmed)]; ok && strings.ToUpper(trimmed) != trimmed && len(trimmed) == 2 && trimmed[1] == 'b' {
			// 4gb is 4Gi to whoever writes it like that; 4GB is the decimal unit.
			m = strings.ToUpper(trimmed[:1]) + "i"
		}
	}
	if m == "" {
		return NewError(CodeBadUnit, "%s has an unknown unit", Quote(s)).WithHint("write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)")
	}
	return NewError(CodeBadUnit, "%s has an unknown unit", Quote(s)).WithHint("write %s", strings.TrimPrefix(num, "+")+m)
}

// meantWithoutUnit guesses what a bare number stands for: bytes where it is as large as bytes
// are and comes out round, MiB otherwise.
func meantWithoutUnit(num string, r *big.Rat) string {
	if r.IsInt() && r.Num().IsUint64() {
		n := r.Num().Uint64()
		if n >= 16*mib && n <= maxQuantity {
			return roundedForm(n)
		}
		return strconv.FormatUint(n, 10) + "Mi"
	}
	if num == "" || strings.HasPrefix(num, ".") {
		return "a quantity such as 4Gi"
	}
	return num + "Gi" // 1.5, 0.5: nobody means half a MiB
}

// roundedForm is n in a form that a person would write: exact if that is short, else rounded
// down to 1 MiB, or to 1 KiB below that.
func roundedForm(n uint64) string {
	if s := FormatBytes(n); !strings.Contains(s, ".") {
		return s
	}
	if n >= mib {
		return FormatBytes(n / mib * mib)
	}
	return FormatBytes(n / kib * kib)
}

// FormatBytes is the shortest exact form: 4Gi, 1536Mi, 0, max; decimal (4G) where only that is
// exact, with a fraction (4294967.297k) where nothing else is. [ParseQuantity] reads every form
// but max back to the same number.
func FormatBytes(b uint64) string {
	if b == Unlimited {
		return "max"
	}
	if b == 0 {
		return "0"
	}
	binary, decimal := scaled(b, "Ei", "Pi", "Ti", "Gi", "Mi", "Ki"), scaled(b, "E", "P", "T", "G", "M", "k")
	switch {
	case binary != "" && (decimal == "" || len(binary) <= len(decimal)):
		return binary
	case decimal != "":
		return decimal
	}
	frac := fmt.Sprintf("%03d", b%1000)
	return strconv.FormatUint(b/1000, 10) + "." + strings.TrimRight(frac, "0") + "k"
}

// scaled is b in the first of the units that divides it, or "".
func scaled(b uint64, suffixes ...string) string {
	for _, u := range suffixes {
		if b%units[u] == 0 {
			return strconv.FormatUint(b/units[u], 10) + u
		}
	}
	return ""
}

// HumanBytes is a rounded form for people: "4.3 GiB". It has at most one digit behind the point.
func HumanBytes(b uint64) string {
	if b == Unlimited {
		return "max"
	}
	if b < kib {
		return strconv.FormatUint(b, 10) + " B"
	}
	v, u := float64(b), 0
	for v >= 1023.95 && u < 6 { // what would be printed as 1024.0 belongs to the next unit
		v /= 1024
		u++
	}
	s := fmt.Sprintf("%.1f", v)
	return strings.TrimSuffix(s, ".0") + " " + []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}[u]
}

// Quote puts a user's text into quotes, cut where it would push the rest of a sentence out of
// sight, and with everything unprintable escaped.
func Quote(s string) string {
	const keep = 40
	if len(s) > keep {
		cut := keep
		for cut > 0 && s[cut]&0xc0 == 0x80 { // not within a rune
			cut--
		}
		return strconv.Quote(s[:cut]+"…") + fmt.Sprintf(" (%d characters)", len(s))
	}
	return strconv.Quote(s)
}

// parsePercent reads a percentage.
func parsePercent(s string) (Amount, *Error) {
	num := strings.TrimSpace(strings.TrimSuffix(s, "%"))
	bad := func(hint string) (Amount, *Error) {
		return Amount{}, NewError(CodeBadPercent, "%s is not a percentage between 0%% and 100%%", Quote(s)).WithHint("%s", hint)
	}
	if num == "" || len(num) > maxNumberLen || strings.Trim(num, "0123456789.") != "" {
		return bad("write one such as 25%")
	}
	r, ok := new(big.Rat).SetString(num)
	if !ok {
		return bad("write one such as 25%")
	}
	r.Quo(r, big.NewRat(100, 1))
	if r.Cmp(big.NewRat(1, 1)) > 0 {
		return bad("write at most 100%")
	}
	if !r.Num().IsUint64() || !r.Denom().IsUint64() || r.Denom().Uint64() > maxShareDen {
		return bad("write at most 7 digits behind the point")
	}
	return Amount{Kind: KindShare, Num: r.Num().Uint64(), Den: r.Denom().Uint64()}, nil
}

// ParseAmount reads a value of a memory key that is not a per-GPU list: a quantity, 25%, or max;
// and 1/N where policy is speaking. The error is an [*Error] that quotes the value.
func ParseAmount(s string, inPolicy bool) (Amount, error) {
	a, err := parseAmount(s, inPolicy)
	if err != nil {
		return Amount{}, err
	}
	return a, nil
}

func parseAmount(s string, inPolicy bool) (Amount, *Error) {
	s = strings.TrimSpace(s)
	switch {
	case s == "max":
		return Amount{Kind: KindUnlimited}, nil
	case strings.EqualFold(s, "max") || strings.EqualFold(s, "unlimited") || strings.EqualFold(s, "infinity") || s == "-1":
		return Amount{}, NewError(CodeBadQuantity, "%s is not a quantity", Quote(s)).WithHint("write max for no limit")
	case strings.HasSuffix(s, "%"):
		return parsePercent(s)
	case strings.Contains(s, "/"):
		if !inPolicy {
			return Amount{}, NewError(CodeBadShare, "%s is for node policy only", Quote(s)).WithHint("write a percentage such as 25%%")
		}
		n, err := strconv.ParseUint(strings.TrimPrefix(s, "1/"), 10, 32)
		if err != nil || !strings.HasPrefix(s, "1/") || n == 0 || n > 1024 {
			return Amount{}, NewError(CodeBadShare, "%s is not 1/N with N from 1 to 1024", Quote(s)).WithHint("write one such as 1/4")
		}
		return Share(1, n), nil
	}
	n, err := parseQuantity(s)
	if err != nil {
		return Amount{}, err
	}
	return Bytes(n), nil
}
