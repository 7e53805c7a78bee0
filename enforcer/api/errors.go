// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"
)

// Codes of what can be wrong with a request itself; docs/errors.md explains each.
const (
	CodeUnreachable   = "E3001" // gpufenced does not answer on its socket
	CodeBadRequest    = "E3002" // the body or a query parameter cannot be understood
	CodeTooLarge      = "E3003" // the body exceeds MaxRequestBytes
	CodeForbidden     = "E3004" // the peer may not do this
	CodeNoSuchPath    = "E3005" // unknown path, or another version of the protocol
	CodeNoSuchMethod  = "E3006" // the path exists, the method does not
	CodeInternal      = "E3007" // a fault in gpufenced, with its cause
	CodeNotFound      = "E3008" // no such container
	CodeAmbiguous     = "E3009" // several containers fit the name
	CodeBadAnswer     = "E3010" // the answer is not ours
	CodeStillStarting = "E3011" // gpufenced has not finished its start, or is stopping
)

// Error is an answer of gpufenced in words: "gpufence: E1203 memory.max ...".
func (e *Error) Error() string {
	if e.Code == "" {
		return "gpufence: " + e.Message
	}
	return "gpufence: " + e.Code + " " + e.Message
}

// Errorf makes an [Error] with a code of docs/errors.md.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// ErrUnreachable is what errors.Is finds in every error that says that gpufenced could not be
// talked to at all; a caller may then fail closed or, for reads, say so and go on.
var ErrUnreachable = errors.New("gpufenced is not reachable")

// UnreachableError says which socket did not answer and how to start who listens there.
type UnreachableError struct {
	Socket string
	Err    error
}

// Error is one sentence: where, why, how to mend.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("gpufence: %s gpufenced does not answer on %s: start it with "+
		"`systemctl start gpufenced` (or `gpufenced --socket %s`): %v", CodeUnreachable, e.Socket, e.Socket, e.Err)
}

// Unwrap gives the cause of the last attempt.
func (e *UnreachableError) Unwrap() error { return e.Err }

// Is makes errors.Is(err, ErrUnreachable) true.
func (e *UnreachableError) Is(target error) bool { return target == ErrUnreachable }
