// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"fmt"
	"strings"
)

// Code is the stable name of an error, as users, alerts and docs/errors.md know it. It is an
// error itself, so that a caller asks errors.Is(err, quota.CodeNoUnit).
type Code string

// Error makes a Code usable as the target of errors.Is.
func (c Code) Error() string { return string(c) }

// Error is what a user reads: one sentence with a stable code, and how to mend it. The part
// that matters lies in the first 200 characters, since that is what engines show.
type Error struct {
	Code    Code
	Message string // what is wrong and where, without code and prefix
	Hint    string // how to mend it; "" if the message says it
	cause   error
}

// Error is the whole sentence: `E1203 memory.max "4096" has no unit: write 4096Mi`.
func (e *Error) Error() string {
	if e.Hint == "" {
		return string(e.Code) + " " + e.Message
	}
	return string(e.Code) + " " + e.Message + ": " + e.Hint
}

// Sentence is the sentence without its code, as it travels in the API's error body.
func (e *Error) Sentence() string { return strings.TrimPrefix(e.Error(), string(e.Code)+" ") }

// Is matches a [Code].
func (e *Error) Is(target error) bool {
	c, ok := target.(Code)
	return ok && c == e.Code
}

// Unwrap gives the error that the message was made from with %w, or nil.
func (e *Error) Unwrap() error { return e.cause }

// WithHint returns a copy of e that says how to mend it.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// NewError makes an error with a code. The format may contain %w.
func NewError(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// CodeOf finds the code of an error, or "" if it has none.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
