// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"syscall"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// connectRetry is the pause between two attempts to reach a socket that nobody serves yet;
// short, since a container's start waits for it.
const connectRetry = 20 * time.Millisecond

// Client talks to gpufenced. Its methods return an [*Error] for what gpufenced refused, an
// error that is [ErrUnreachable] where nobody answered, and the context's error where the
// caller gave up. It is safe for concurrent use.
type Client struct {
	socket string
	wait   time.Duration
}

// NewClient makes a client of the socket at the path. Each request waits up to wait for
// somebody to accept the connection (0: one attempt), and within that time is made again if the
// connection is closed before an answer; every request of the protocol may be made twice. The
// answer itself is bounded by the context that the caller gives.
func NewClient(socket string, wait time.Duration) *Client {
	return &Client{socket: socket, wait: wait}
}

// Socket is the path that the client talks to.
func (c *Client) Socket() string { return c.socket }

// dial connects, trying again as long as nobody listens.
func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	deadline := time.Now().Add(c.wait)
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, "unix", c.socket)
		if err == nil {
			return conn, nil
		}
		// Not there yet, or there and nobody listens (a restart), or its backlog is full: worth
		// another attempt. Everything else (EACCES, a path too long) will not mend by waiting.
		again := errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN)
		if !again || !time.Now().Add(connectRetry).Before(deadline) {
			return nil, &UnreachableError{Socket: c.socket, Err: cause(err)}
		}
		select {
		case <-ctx.Done():
			return nil, &UnreachableError{Socket: c.socket, Err: ctx.Err()}
		case <-time.After(connectRetry):
		}
	}
}

// cause strips "dial unix /path:" from an error whose text names the path already.
func cause(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// Prepare asks for the grant of a container that is about to be created.
func (c *Client) Prepare(ctx context.Context, req PrepareRequest) (PrepareResponse, error) {
	var resp PrepareResponse
	return resp, c.call(ctx, methodPost, "/v1/prepare", req, &resp)
}

// Register raises the fences of a prepared container around its first process.
func (c *Client) Register(ctx context.Context, req RegisterRequest) (RegisterResponse, error) {
	var resp RegisterResponse
	return resp, c.call(ctx, methodPost, "/v1/register", req, &resp)
}

// Unregister says that a container is gone. An unknown key is no error.
func (c *Client) Unregister(ctx context.Context, req UnregisterRequest) error {
	return c.call(ctx, methodPost, "/v1/unregister", req, &struct{}{})
}

// Containers lists what is prepared, runs, or ended not long ago.
func (c *Client) Containers(ctx context.Context) ([]Container, error) {
	var resp []Container
	return resp, c.call(ctx, methodGet, "/v1/containers", nil, &resp)
}

// Container shows one, by any unambiguous name (see [Container]).
func (c *Client) Container(ctx context.Context, id string) (Container, error) {
	var resp Container
	return resp, c.call(ctx, methodGet, "/v1/containers/"+url.PathEscape(id), nil, &resp)
}

// Set changes limits of a container.
func (c *Client) Set(ctx context.Context, id string, req SetRequest) (SetResponse, error) {
	var resp SetResponse
	return resp, c.call(ctx, methodPost, "/v1/containers/"+url.PathEscape(id)+"/set", req, &resp)
}

// GPUs lists the node's GPUs as gpufenced sees them.
func (c *Client) GPUs(ctx context.Context) ([]GPUState, error) {
	var resp []GPUState
	return resp, c.call(ctx, methodGet, "/v1/gpus", nil, &resp)
}

// Version says who answers.
func (c *Client) Version(ctx context.Context) (Version, error) {
	var resp Version
	return resp, c.call(ctx, methodGet, "/v1/version", nil, &resp)
}

// Node says what gpufenced knows of itself.
func (c *Client) Node(ctx context.Context) (Node, error) {
	var resp Node
	return resp, c.call(ctx, methodGet, "/v1/node", nil, &resp)
}

// Apply follows the annotations of changed manifests.
func (c *Client) Apply(ctx context.Context, req ApplyRequest) (ApplyResponse, error) {
	var resp ApplyResponse
	return resp, c.call(ctx, methodPost, "/v1/apply", req, &resp)
}

// Reload makes gpufenced read its configuration again.
func (c *Client) Reload(ctx context.Context) (ConfigInfo, error) {
	var resp ConfigInfo
	return resp, c.call(ctx, methodPost, "/v1/reload", ReloadRequest{}, &resp)
}

// Quiesce lets NVML go and refuses starts.
func (c *Client) Quiesce(ctx context.Context, reason string) (Switch, error) {
	var resp Switch
	return resp, c.call(ctx, methodPost, "/v1/quiesce", SwitchRequest{Reason: reason}, &resp)
}

// Resume ends Quiesce and Disable.
func (c *Client) Resume(ctx context.Context) (Switch, error) {
	var resp Switch
	return resp, c.call(ctx, methodPost, "/v1/resume", SwitchRequest{}, &resp)
}

// Disable enforces nothing any more, until Resume.
func (c *Client) Disable(ctx context.Context, reason string) (Switch, error) {
	var resp Switch
	return resp, c.call(ctx, methodPost, "/v1/disable", SwitchRequest{Reason: reason}, &resp)
}

// Metrics is the text that Prometheus reads.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	resp, err := c.do(ctx, methodGet, PathMetrics, nil)
	if err != nil {
		return nil, err
	}
	defer resp.close()
	if resp.code != statusOK {
		return nil, readError(resp)
	}
	text, err := io.ReadAll(io.LimitReader(resp.body, MaxResponseBytes))
	if err != nil {
		return nil, &UnreachableError{Socket: c.socket, Err: fmt.Errorf("read metrics: %w", err)}
	}
	return text, nil
}

// Events calls emit for each event whose number is greater than since, oldest first, and, if
// follow is set, for each new one until the context ends, emit returns an error (which Events
// returns), or gpufenced goes away.
func (c *Client) Events(ctx context.Context, since uint64, follow bool, emit func(Event) error) error {
	path := "/v1/events?since=" + strconv.FormatUint(since, 10)
	if follow {
		path += "&follow=1"
	}
	resp, err := c.do(ctx, methodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.close()
	if resp.code != statusOK {
		return readError(resp)
	}
	lines := bufio.NewScanner(resp.body)
	lines.Buffer(nil, MaxEventBytes)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue // keep-alive
		}
		var ev Event
		if err := json.Unmarshal(line, &ev); err != nil {
			if lines.Err() != nil {
				break // the stream was cut in the line
			}
			return Errorf(quota.CodeBadAnswer, "gpufenced at %s sent an event that is not JSON: %v", c.socket, err)
		}
		if err := emit(ev); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := lines.Err(); err != nil {
		return &UnreachableError{Socket: c.socket, Err: fmt.Errorf("read events: %w", err)}
	}
	return nil
}

// call sends one request and decodes its answer.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	resp, err := c.do(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer resp.close()
	if resp.code/100 != 2 {
		return readError(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.body, MaxResponseBytes+1))
	if err != nil {
		return &UnreachableError{Socket: c.socket, Err: fmt.Errorf("read answer: %w", err)}
	}
	if len(body) > MaxResponseBytes {
		return Errorf(quota.CodeBadAnswer, "gpufenced at %s sent more than %d bytes", c.socket, MaxResponseBytes)
	}
	if err := json.Unmarshal(body, out); err != nil {
		return Errorf(quota.CodeBadAnswer, "gpufenced at %s sent an answer that is not ours: %v", c.socket, err)
	}
	return nil
}

func (c *Client) do(ctx context.Context, method, path string, in any) (*answer, error) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
	}
	deadline := time.Now().Add(c.wait)
	for {
		resp, err := c.once(ctx, method, path, body)
		if err == nil {
			return resp, nil
		}
		closed := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
		if closed && ctx.Err() == nil && time.Now().Add(connectRetry).Before(deadline) {
			// It made room for others, or gpufenced was restarted.
			time.Sleep(connectRetry)
			continue
		}
		var gone *UnreachableError
		if errors.As(err, &gone) {
			return nil, gone
		}
		if ctxErr := ctx.Err(); ctxErr != nil {
			if errors.Is(ctxErr, context.DeadlineExceeded) {
				return nil, &UnreachableError{Socket: c.socket, Err: errors.New("no answer in time")}
			}
			return nil, ctxErr
		}
		return nil, &UnreachableError{Socket: c.socket, Err: cause(err)}
	}
}

func (c *Client) once(ctx context.Context, method, path string, body []byte) (*answer, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	return exchange(ctx, conn, method, path, body)
}

// readError makes an [*Error] of an answer that is not 2xx, whoever wrote it.
func readError(resp *answer) error {
	body, err := io.ReadAll(io.LimitReader(resp.body, 64<<10))
	if err != nil {
		return Errorf(quota.CodeBadAnswer, "gpufenced answered %s, and its reason could not be read: %v", resp.status, err)
	}
	var e Error
	if err := json.Unmarshal(body, &e); err != nil || e.Code == "" || e.Message == "" {
		return Errorf(quota.CodeBadAnswer, "gpufenced answered %s without a reason of ours", resp.status)
	}
	return &e
}
