// SPDX-License-Identifier: Apache-2.0

package quota

// AmountKind says how an [Amount] is written.
type AmountKind uint8

const (
	KindNone      AmountKind = iota // not given
	KindBytes                       // 4Gi
	KindShare                       // 25%, 1/4: of allocatable
	KindUnlimited                   // max
)

// Amount is a quantity, a share of a GPU's allocatable bytes, or max.
type Amount struct {
	Kind     AmountKind
	Bytes    uint64
	Num, Den uint64 // of KindShare
}

// ParseQuantity reads a quantity of bytes: Kubernetes' notation, where everything but 0 has a
// unit. The error is an [*Error] without the key's name; see [ParseNamed].
func ParseQuantity(s string) (uint64, error) { return 0, nil }

// FormatBytes is the shortest exact form in binary units: 4Gi, 1536Mi, 0, max.
func FormatBytes(b uint64) string { return "" }

// HumanBytes is a rounded form for people: "4.3 GiB".
func HumanBytes(b uint64) string { return "" }
