// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// Methods and statuses of the protocol. They are written out here, and requests and answers are
// written and read here, because net/http starts all of TLS with every process that links it: the
// client is in the programs that run twice for every container.
const (
	methodGet  = "GET"
	methodPost = "POST"
	statusOK   = 200
)

// Bounds of what an answer may be beside its body.
const (
	maxHeadBytes = 64 << 10 // all header lines, and all trailers
	maxLineBytes = 16 << 10 // one line of them, or of a chunk's length
)

// answer is what came back: the head, and a body that ends with io.EOF only where the peer said
// that it ends.
type answer struct {
	code   int
	status string // the code and its words: 404 Not Found
	body   io.Reader
	close  func()
}

// exchange sends one request over the connection, which it owns from then on, and reads the
// answer's head. When the context ends, reads of the body fail.
func exchange(ctx context.Context, conn net.Conn, method, path string, body []byte) (*answer, error) {
	// A time that is past wakes whoever waits; it is the only deadline that is ever set.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // it fails where the connection is closed
	end := func() {
		stop()
		_ = conn.Close() // nothing is lost: one request, and its answer is read or given up
	}
	_, sendErr := conn.Write(request(method, path, body))
	// Who refuses a request may answer before it has read the whole, and close.
	a, err := readAnswer(bufio.NewReaderSize(conn, maxLineBytes))
	if err != nil {
		end()
		if sendErr != nil {
			return nil, sendErr
		}
		return nil, err
	}
	a.close = end
	return a, nil
}

// request is the whole text of one. The path is escaped already.
func request(method, path string, body []byte) []byte {
	var b bytes.Buffer
	// A kept connection would meet a restart of gpufenced with an error.
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: gpufenced\r\nConnection: close\r\n", method, path)
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n")
	b.Write(body)
	return b.Bytes()
}

// readAnswer reads the head of an HTTP/1.1 answer. It takes what RFC 9112 lets a server send to a
// request that asks for no upgrade and no interim answer, and nothing that may be read two ways.
// The error is io.EOF where not one byte came.
func readAnswer(r *bufio.Reader) (*answer, error) {
	left := maxHeadBytes
	line, err := readLine(r, &left)
	if err != nil {
		return nil, err
	}
	version, status, _ := strings.Cut(line, " ")
	digits, _, _ := strings.Cut(status, " ")
	code, err := strconv.ParseUint(digits, 10, 16)
	if version != "HTTP/1.1" || err != nil || len(digits) != 3 || code < statusOK || code > 599 {
		return nil, fmt.Errorf("the answer begins with %.40q, which is no HTTP", line)
	}
	a := &answer{code: int(code), status: status, body: r}
	var length *int64
	chunkedBody := false
	for {
		name, value, err := readField(r, &left)
		if err != nil {
			return nil, err
		}
		switch {
		case name == "":
			switch {
			case chunkedBody && length != nil:
				return nil, errors.New("the answer has two lengths")
			case code == 204 || code == 304:
				a.body = strings.NewReader("")
			case chunkedBody:
				a.body = &chunks{r: r}
			case length != nil:
				a.body = &counted{r: r, left: *length}
			}
			return a, nil
		case strings.EqualFold(name, "Content-Length"):
			n, err := strconv.ParseUint(value, 10, 63)
			if err != nil || length != nil {
				return nil, fmt.Errorf("the answer's length %.40q is no number, or comes twice", value)
			}
			signed := int64(n)
			length = &signed
		case strings.EqualFold(name, "Transfer-Encoding"):
			if chunkedBody || !strings.EqualFold(value, "chunked") {
				return nil, fmt.Errorf("the answer's encoding %.40q is not one that was asked for", value)
			}
			chunkedBody = true
		}
	}
}

// readField reads one header line or trailer; the name is "" for the empty line at their end.
func readField(r *bufio.Reader, left *int) (name, value string, err error) {
	line, err := readLine(r, left)
	if err != nil {
		return "", "", unexpected(err)
	}
	if line == "" {
		return "", "", nil
	}
	name, value, ok := strings.Cut(line, ":")
	if !ok || name == "" || strings.ContainsAny(name, " \t") {
		return "", "", fmt.Errorf("the answer has a header line %.40q, which is none", line)
	}
	return name, strings.Trim(value, " \t"), nil
}

// readLine reads up to CR LF, and takes what it read from left. The error is io.EOF only before
// the first byte.
func readLine(r *bufio.Reader, left *int) (string, error) {
	line, err := r.ReadSlice('\n')
	if *left -= len(line); errors.Is(err, bufio.ErrBufferFull) || *left < 0 {
		return "", fmt.Errorf("the answer has more than %d bytes of headers, or a line of more than %d", maxHeadBytes, maxLineBytes)
	}
	if err != nil {
		if len(line) > 0 {
			err = unexpected(err)
		}
		return "", err
	}
	text, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok || bytes.ContainsAny(text, "\r\x00") {
		return "", errors.New("the answer has a line that does not end as HTTP's do")
	}
	return string(text), nil
}

// unexpected makes an error of an end where more must follow.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// counted is a body whose length was said.
type counted struct {
	r    io.Reader
	left int64
}

// Read implements [io.Reader].
func (c *counted) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	if c.left -= int64(n); c.left == 0 {
		return n, nil // whatever the connection met after the last byte
	}
	return n, unexpected(err)
}

// chunks is a body that comes in pieces, each with its length.
type chunks struct {
	r     *bufio.Reader
	left  int64 // of the present one
	begun bool  // there was one
	err   error // sticks
}

// Read implements [io.Reader].
func (c *chunks) Read(p []byte) (int, error) {
	if c.err != nil || len(p) == 0 {
		return 0, c.err
	}
	if c.left == 0 {
		if c.err = c.next(); c.err != nil {
			return 0, c.err
		}
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	c.err = unexpected(err)
	return n, c.err
}

// next reads the length of the next chunk; io.EOF: there is none, and the body is whole.
func (c *chunks) next() error {
	left := maxLineBytes
	if c.begun {
		line, err := readLine(c.r, &left)
		if err != nil {
			return unexpected(err)
		}
		if line != "" {
			return errors.New("the answer's chunk is longer than it said")
		}
	}
	c.begun = true
	line, err := readLine(c.r, &left)
	if err != nil {
		return unexpected(err)
	}
	digits, _, _ := strings.Cut(line, ";") // extensions are for nobody
	size, err := strconv.ParseUint(strings.TrimRight(digits, " \t"), 16, 63)
	if err != nil {
		return fmt.Errorf("the answer's chunk has the length %.40q, which is no number", digits)
	}
	if c.left = int64(size); size > 0 {
		return nil
	}
	for trailers := maxHeadBytes; ; {
		name, _, err := readField(c.r, &trailers)
		if err != nil {
			return err
		}
		if name == "" {
			return io.EOF
		}
	}
}
