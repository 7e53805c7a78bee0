// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/gpufence/gpufence/hook/plan"
)

// Bounds on what an image's executable may make us read.
const (
	maxProgramHeaders = 256
	maxInterpreter    = 4096 // PATH_MAX, which the kernel enforces too
	maxShebang        = 256  // BINPRM_BUF_SIZE
)

var errNotELF = errors.New("not an ELF executable")

// elfInterpreter returns the dynamic loader that an ELF executable names, "" for a static one.
// It reads program headers only, each with bounds: debug/elf would follow the section headers
// of a file that a container's author wrote.
func elfInterpreter(r io.ReaderAt) (string, error) {
	var ident [16]byte
	if _, err := r.ReadAt(ident[:], 0); err != nil {
		return "", errNotELF
	}
	if !bytes.Equal(ident[:4], []byte("\x7fELF")) {
		return "", errNotELF
	}
	wide := ident[4] == 2
	var order binary.ByteOrder = binary.LittleEndian
	if ident[5] == 2 {
		order = binary.BigEndian
	}
	size := 52
	if wide {
		size = 64
	}
	header := make([]byte, size)
	if _, err := r.ReadAt(header, 0); err != nil {
		return "", errNotELF
	}
	var table uint64
	var entry, count uint16
	if wide {
		table, entry, count = order.Uint64(header[32:]), order.Uint16(header[54:]), order.Uint16(header[56:])
	} else {
		table, entry, count = uint64(order.Uint32(header[28:])), order.Uint16(header[42:]), order.Uint16(header[44:])
	}
	least := uint16(32)
	if wide {
		least = 56
	}
	if entry < least || count > maxProgramHeaders || table > 1<<62 {
		return "", errNotELF
	}
	for i := range int64(count) {
		ph := make([]byte, least)
		if _, err := r.ReadAt(ph, int64(table)+i*int64(entry)); err != nil {
			return "", errNotELF
		}
		if order.Uint32(ph) != 3 { // PT_INTERP
			continue
		}
		var offset, length uint64
		if wide {
			offset, length = order.Uint64(ph[8:]), order.Uint64(ph[32:])
		} else {
			offset, length = uint64(order.Uint32(ph[4:])), uint64(order.Uint32(ph[16:]))
		}
		if length < 2 || length > maxInterpreter || offset > 1<<62 {
			return "", errNotELF
		}
		name := make([]byte, length)
		if _, err := r.ReadAt(name, int64(offset)); err != nil {
			return "", errNotELF
		}
		name, _, _ = bytes.Cut(name, []byte{0})
		return string(name), nil
	}
	return "", nil
}

// loaderOf names the C library behind an interpreter's path.
func loaderOf(interpreter string) plan.Loader {
	base := path.Base(interpreter)
	switch {
	case interpreter == "":
		return plan.LoaderStatic
	case strings.HasPrefix(base, "ld-musl-"):
		return plan.LoaderMusl
	case strings.HasPrefix(base, "ld-linux"), strings.HasPrefix(base, "ld64.so"), strings.HasPrefix(base, "ld.so"):
		return plan.LoaderGlibc
	}
	return plan.LoaderUnknown
}

// shebang returns the interpreter of a script's first line.
func shebang(head []byte) (string, bool) {
	rest, ok := bytes.CutPrefix(head, []byte("#!"))
	if !ok {
		return "", false
	}
	line, _, _ := bytes.Cut(rest, []byte{'\n'})
	fields := bytes.Fields(line)
	if len(fields) == 0 || fields[0][0] != '/' {
		return "", false
	}
	return string(fields[0]), true
}
