// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"math"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"
)

const gib = 1 << 30

func TestParseQuantity(t *testing.T) {
	tests := []struct {
		in   string
		want uint64
	}{
		{"0", 0}, {"0.0", 0}, {"0Gi", 0}, {"+0", 0}, {"1Ki", 1024}, {"1k", 1000}, {"4Gi", 4 * gib}, {" 4Gi ", 4 * gib},
		{"4G", 4e9}, {"4096Mi", 4 * gib}, {"0.5Gi", gib / 2}, {"1.5Gi", 3 * gib / 2}, {".5Ki", 512}, {"5.Ki", 5120},
		{"+4Gi", 4 * gib}, {"2Ti", 2 << 40}, {"3M", 3e6}, {"7Ei", 7 << 60}, {"0.001k", 1}, {"004Gi", 4 * gib},
		{"4294967.297k", 4294967297}, {"9223372036854775.807k", math.MaxInt64},
	}
	for _, tt := range tests {
		got, err := ParseQuantity(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("%q: %d, %v, want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestParseQuantityErrors(t *testing.T) {
	long := strings.Repeat("9", 100)
	tests := []struct{ in, want string }{
		{"", `E1201 is empty: write a quantity such as 4Gi`},
		{"   ", `E1201 is empty: write a quantity such as 4Gi`},
		{"four", `E1201 "four" is not a quantity: write one such as 4Gi, or 25%, or max`},
		{"-", `E1201 "-" is not a quantity: write one such as 4Gi, or 25%, or max`},
		{"1.2.3Gi", `E1201 "1.2.3Gi" is not a quantity: write one such as 4Gi, or 25%, or max`},
		{"..Gi", `E1201 "..Gi" is not a quantity: write one such as 4Gi, or 25%, or max`},
		{"4096", `E1203 "4096" has no unit: write 4096Mi`},
		{"+4096", `E1203 "+4096" has no unit: write 4096Mi`},
		{"8", `E1203 "8" has no unit: write 8Mi`},
		{"1.5", `E1203 "1.5" has no unit: write 1.5Gi`},
		{"4294967296", `E1203 "4294967296" has no unit: write 4Gi`},
		{"4000000000", `E1203 "4000000000" has no unit: write 4G`},
		{"4294967297", `E1203 "4294967297" has no unit: write 4Gi`},
		{"4e9", `E1203 "4e9" has no unit: write 4G`},
		{"4E3", `E1203 "4E3" has no unit: write 4000Mi`},
		{".5e0", `E1203 ".5e0" has no unit: write a quantity such as 4Gi`},
		{"4g", `E1202 "4g" has an unknown unit: write 4Gi`},
		{"3000m", `E1202 "3000m" has an unknown unit: write 3000Mi`},
		{"4K", `E1202 "4K" has an unknown unit: write 4Ki`},
		{"4GB", `E1202 "4GB" has an unknown unit: write 4G`},
		{"4gb", `E1202 "4gb" has an unknown unit: write 4Gi`},
		{"4GiB", `E1202 "4GiB" has an unknown unit: write 4Gi`},
		{"4gib", `E1202 "4gib" has an unknown unit: write 4Gi`},
		{"4gi", `E1202 "4gi" has an unknown unit: write 4Gi`},
		{"+4g", `E1202 "+4g" has an unknown unit: write 4Gi`},
		{"4 Gi", `E1202 "4 Gi" has an unknown unit: write 4Gi`},
		{"4mb", `E1202 "4mb" has an unknown unit: write 4Mi`},
		{"4u", `E1202 "4u" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"4n", `E1202 "4n" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"4B", `E1202 "4B" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"0x10", `E1202 "0x10" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"4Gi4", `E1202 "4Gi4" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"4e99", `E1202 "4e99" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"4\nGi", `E1202 "4\nGi" has an unknown unit: write 4Gi`},
		{"0.3Gi", `E1204 "0.3Gi" is not a whole number of bytes: write 307Mi`},
		{"0.0001Ki", `E1204 "0.0001Ki" is not a whole number of bytes: write 0`},
		{"0.3333Ki", `E1204 "0.3333Ki" is not a whole number of bytes: write 0`},
		{"-4Gi", `E1205 "-4Gi" is negative: write "4Gi"`},
		{"-0", `E1205 "-0" is negative: write "0"`},
		{"8Ei", `E1206 "8Ei" is more than 9223372036854775807 bytes: write max for no limit`},
		{"99999Ei", `E1206 "99999Ei" is more than 9223372036854775807 bytes: write max for no limit`},
		{long + "Gi", `E1206 "9999999999999999999999999999999999999999…" (102 characters) has more digits than a number of bytes can have: write one such as 4Gi`},
	}
	for _, tt := range tests {
		_, err := ParseQuantity(tt.in)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%q:\n got %v\nwant %s", tt.in, err, tt.want)
		}
	}
}

// What an error says to write must be taken.
func TestSuggestionsAreValid(t *testing.T) {
	for _, in := range []string{"4096", "8", "1.5", "4294967296", "4294967297", "4e9", "4g", "3000m", "4K", "4GB", "4gb", "4GiB", "0.3Gi", "0.0001Ki", "-4Gi", "16777217", "33554433"} {
		_, err := ParseQuantity(in)
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%q: %v", in, err)
			continue
		}
		hint := strings.Trim(strings.TrimPrefix(e.Hint, "write "), `"`)
		if _, err := ParseQuantity(hint); err != nil {
			t.Errorf("%q: the hint %q is wrong: %v", in, e.Hint, err)
		}
	}
}

func TestParseAmount(t *testing.T) {
	const alloc = 16*gib + 1
	tests := []struct {
		in     string
		policy bool
		want   uint64 // on alloc
		str    string
	}{
		{"max", false, Unlimited, "max"},
		{"25%", false, 4 * gib, "25%"},
		{"12.5%", false, 2 * gib, "12.5%"},
		{"0%", false, 0, "0%"},
		{"100%", false, 16 * gib, "100%"},
		{"33.3333333%", false, (alloc * 333333333 / 1000000000) / granule * granule, "33.3333333%"},
		{" 25 %", false, 4 * gib, "25%"},
		{"1/4", true, 4 * gib, "25%"},
		{"1/3", true, alloc / 3 / granule * granule, "1/3"},
		{"1/1", true, 16 * gib, "100%"},
		{"4Gi", true, 4 * gib, "4Gi"},
	}
	for _, tt := range tests {
		a, err := ParseAmount(tt.in, tt.policy)
		if err != nil {
			t.Errorf("%q: %v", tt.in, err)
			continue
		}
		if got := a.On(alloc); got != tt.want {
			t.Errorf("%q: %d, want %d", tt.in, got, tt.want)
		}
		if got := a.String(); got != tt.str {
			t.Errorf("%q: prints as %q, want %q", tt.in, got, tt.str)
		}
	}
	if got := (Amount{}).String(); got != "none" {
		t.Errorf("no amount prints as %q", got)
	}
	if got := (Amount{}).On(1); got != Unlimited {
		t.Errorf("no amount is %d", got)
	}
	if Share(2, 1).Kind != KindNone || Share(1, 0).Kind != KindNone || Share(1, 2).Kind != KindShare {
		t.Error("Share takes what is no share")
	}
}

func TestParseAmountErrors(t *testing.T) {
	tests := []struct {
		in     string
		policy bool
		want   string
	}{
		{"MAX", false, `E1201 "MAX" is not a quantity: write max for no limit`},
		{"unlimited", false, `E1201 "unlimited" is not a quantity: write max for no limit`},
		{"-1", false, `E1201 "-1" is not a quantity: write max for no limit`},
		{"101%", false, `E1207 "101%" is not a percentage between 0% and 100%: write at most 100%`},
		{"-5%", false, `E1207 "-5%" is not a percentage between 0% and 100%: write one such as 25%`},
		{"%", false, `E1207 "%" is not a percentage between 0% and 100%: write one such as 25%`},
		{"1e1%", false, `E1207 "1e1%" is not a percentage between 0% and 100%: write one such as 25%`},
		{"1.1.1%", false, `E1207 "1.1.1%" is not a percentage between 0% and 100%: write one such as 25%`},
		{"0.00000001%", false, `E1207 "0.00000001%" is not a percentage between 0% and 100%: write at most 7 digits behind the point`},
		{"1/4", false, `E1219 "1/4" is for node policy only: write a percentage such as 25%`},
		{"2/4", true, `E1219 "2/4" is not 1/N with N from 1 to 1024: write one such as 1/4`},
		{"1/0", true, `E1219 "1/0" is not 1/N with N from 1 to 1024: write one such as 1/4`},
		{"1/1025", true, `E1219 "1/1025" is not 1/N with N from 1 to 1024: write one such as 1/4`},
		{"1/x", true, `E1219 "1/x" is not 1/N with N from 1 to 1024: write one such as 1/4`},
	}
	for _, tt := range tests {
		_, err := ParseAmount(tt.in, tt.policy)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%q:\n got %v\nwant %s", tt.in, err, tt.want)
		}
	}
}

func TestFormat(t *testing.T) {
	tests := []struct {
		in           uint64
		exact, human string
	}{
		{0, "0", "0 B"}, {1, "0.001k", "1 B"}, {1000, "1k", "1000 B"}, {1024, "1Ki", "1 KiB"}, {1536, "1.536k", "1.5 KiB"},
		{4 * gib, "4Gi", "4 GiB"}, {1536 * mib, "1536Mi", "1.5 GiB"}, {4e9, "4G", "3.7 GiB"}, {4*gib + 1, "4294967.297k", "4 GiB"},
		{gib - 1, "1073741.823k", "1 GiB"}, {4617089843, "4617089.843k", "4.3 GiB"}, {Unlimited, "max", "max"}, {7 << 60, "7Ei", "7 EiB"},
		{Unlimited - 1, "18446744073709551.614k", "16 EiB"},
	}
	for _, tt := range tests {
		if got := FormatBytes(tt.in); got != tt.exact {
			t.Errorf("FormatBytes(%d) = %q, want %q", tt.in, got, tt.exact)
		}
		if got := HumanBytes(tt.in); got != tt.human {
			t.Errorf("HumanBytes(%d) = %q, want %q", tt.in, got, tt.human)
		}
	}
}

func TestQuote(t *testing.T) {
	if got := Quote("a\"b\n"); got != `"a\"b\n"` {
		t.Errorf("got %s", got)
	}
	if got := Quote(strings.Repeat("é", 40)); len(got) > 70 || !strings.HasSuffix(got, "(80 characters)") || strings.Contains(got, "\\x") {
		t.Errorf("got %s", got)
	}
}

func TestFormatRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint64Range(0, maxQuantity).Draw(t, "n")
		if shift := rapid.IntRange(0, 40).Draw(t, "shift"); rapid.Bool().Draw(t, "round") {
			n = n >> shift << shift
		}
		got, err := ParseQuantity(FormatBytes(n))
		if err != nil || got != n {
			t.Fatalf("%d prints as %q, which reads as %d, %v", n, FormatBytes(n), got, err)
		}
	})
}

// Whatever we accept means what Kubernetes means by it.
func TestQuantityAgreesWithKubernetes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringMatching(`[+-]?[0-9]{0,20}\.?[0-9]{0,6}(|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|m|u|n|e[0-9]|E[0-9])`).Draw(t, "s")
		agrees(t, s)
	})
}

func agrees(t interface{ Fatalf(string, ...any) }, s string) {
	got, err := ParseQuantity(s)
	if err != nil {
		return
	}
	q, err := resource.ParseQuantity(strings.TrimSpace(s))
	if err != nil {
		t.Fatalf("we take %q, Kubernetes says %v", s, err)
	}
	if v := q.Value(); v < 0 || uint64(v) != got {
		t.Fatalf("%q is %d to us and %d to Kubernetes", s, got, v)
	}
}

func FuzzParseQuantity(f *testing.F) {
	for _, s := range []string{"4Gi", "0", "4096", "1.5Gi", "25%", "max", "-1", "1/4", "4e9", "9223372036854775807", "9223372036854775.808k", "\x00", "٤Gi", "1_000Ki", "0b1Ki", "Inf", "NaN", "1e", "E", ".", "+.Ki"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		agrees(t, s)
		if _, err := ParseAmount(s, true); err != nil {
			oneSentence(t, err)
		}
	})
}

// oneSentence holds for every error that a user can cause.
func oneSentence(t *testing.T, err error) {
	t.Helper()
	if CodeOf(err) == "" {
		t.Errorf("no code: %q", err)
	}
	if strings.ContainsAny(err.Error(), "\n\r\x00") {
		t.Errorf("not one printable line: %q", err)
	}
	if len(err.Error()) > 700 {
		t.Errorf("%d characters: %q", len(err.Error()), err)
	}
}

// Equal shares of a GPU fit on it, whatever its size.
func TestSharesFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		alloc := rapid.Uint64Range(0, 1<<50).Draw(t, "allocatable")
		parts := rapid.SliceOfN(rapid.Uint64Range(0, 10_000_000), 1, 8).Draw(t, "parts")
		var whole uint64
		for _, p := range parts {
			whole += p
		}
		if whole == 0 {
			return
		}
		var sum uint64
		for _, p := range parts {
			a := Share(p, whole)
			b := a.On(alloc)
			if b%granule != 0 || b > alloc {
				t.Fatalf("%d/%d of %d is %d", p, whole, alloc, b)
			}
			sum += b
		}
		if sum > alloc {
			t.Fatalf("%v of %d sum to %d", parts, alloc, sum)
		}
		if n := rapid.Uint64Range(1, 1024).Draw(t, "n"); Share(1, n).On(alloc)*n > alloc {
			t.Fatalf("%d times 1/%d do not fit into %d", n, n, alloc)
		}
	})
}
