// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Error is the sentence with its code in front: `E1203 memory.max ...`.
func (e *Error) Error() string {
	if e.Code == "" {
		return e.Message
	}
	return e.Code + " " + e.Message
}

// Is matches a [quota.Code].
func (e *Error) Is(target error) bool {
	c, ok := target.(quota.Code)
	return ok && string(c) == e.Code
}

// As makes a [*quota.Error] of it, so that a caller treats a refusal of gpufenced like its own.
func (e *Error) As(target any) bool {
	q, ok := target.(**quota.Error)
	if ok {
		*q = &quota.Error{Code: quota.Code(e.Code), Message: e.Message}
	}
	return ok
}

// Errorf makes an [Error] with a code of docs/errors.md.
func Errorf(code quota.Code, format string, args ...any) *Error {
	return &Error{Code: string(code), Message: fmt.Sprintf(format, args...)}
}

// ErrorOf makes an [Error] of any error: with its own code if it has one, else as a fault.
func ErrorOf(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	var q *quota.Error
	if errors.As(err, &q) {
		return &Error{Code: string(q.Code), Message: q.Sentence()}
	}
	return Errorf(quota.CodeInternal, "gpufenced could not do it: %v", err)
}

// ErrUnreachable is what errors.Is finds in every error that says that gpufenced could not be
// talked to at all; a caller may then fail closed or, for reads, say so and go on.
var ErrUnreachable = errors.New("gpufenced is not reachable")

// UnreachableError says which socket did not answer and how to start who listens there.
type UnreachableError struct {
	Socket string
	Err    error
}

func (e *UnreachableError) sentence() string {
	return fmt.Sprintf("gpufenced does not answer on %s (%v): start it with `systemctl start gpufenced`, or by hand with `gpufenced --socket %s`",
		e.Socket, e.Err, e.Socket)
}

// Error is one sentence: where, why, how to mend.
func (e *UnreachableError) Error() string {
	return string(quota.CodeUnreachable) + " " + e.sentence()
}

// Unwrap gives the cause of the last attempt.
func (e *UnreachableError) Unwrap() error { return e.Err }

// Is matches [ErrUnreachable] and [quota.CodeUnreachable].
func (e *UnreachableError) Is(target error) bool {
	return target == ErrUnreachable || target == error(quota.CodeUnreachable)
}

// As makes an [*Error] or a [*quota.Error] of it.
func (e *UnreachableError) As(target any) bool {
	switch t := target.(type) {
	case **Error:
		*t = &Error{Code: string(quota.CodeUnreachable), Message: e.sentence()}
	case **quota.Error:
		*t = &quota.Error{Code: quota.CodeUnreachable, Message: e.sentence()}
	default:
		return false
	}
	return true
}
