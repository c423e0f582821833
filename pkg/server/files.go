package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// LogQuery selects a part of a pair of logs.
type LogQuery struct {
	Stream string `query:"stream" default:"stdout" enum:"stdout,stderr"`
	Offset int64  `query:"offset" default:"0" minimum:"0" doc:"Bytes to skip at the beginning. Range counts from there."`
	Follow bool   `query:"follow" default:"false" doc:"Continue with new output until the end."`
}

type (
	taskLogsInput struct {
		ops.TaskPath
		LogQuery
	}
	recordingInput struct {
		ops.RecordingPath
		Format string `query:"format" default:"asciicast" enum:"asciicast,text" doc:"asciicast: version 2 of the format of asciinema, which players show. text: the text without escape sequences."`
	}
	artifactInput struct {
		ops.TaskPath
		Name string `path:"name" doc:"Name as in the list, percent-escaped. Slashes may be literal." example:"files/report.html"`
	}
)

const textType = "text/plain; charset=utf-8"

func (s *Server) fileRoutes(api huma.API) {
	register(s, api, route{Spec: ops.Spec{
		ID: "getTaskLogs", Method: http.MethodGet, Path: ops.TasksPath + "/{id}/logs", Tag: "tasks", Need: ops.Read, Errors: []int{404, 410, 416},
		Summary: "Get the agent's output",
		About:   "The output byte for byte, with secrets masked. `X-Log-Size` is its current size: the offset from which to continue.",
	}, ranges: true, content: "text/plain"}, func(ctx context.Context, in *taskLogsInput) (*bodyOutput, error) {
		sub, err := eventFeed{s}.taskSubject(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		t, err := s.engine.Task(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		if r, err := s.engine.Stored(ctx, t, ops.File{Task: t.ID, Stream: in.Stream}); r != nil || err != nil {
			return storedLog(ctx, r, in.Offset, err)
		}
		if err := s.tasks.CheckFiles(t); err != nil {
			return nil, err
		}
		dir := s.tasks.Dir(in.ID)
		return eventFeed{s}.logs(ctx, sub, in.LogQuery, dir.Stdout(), dir.Stderr())
	})
	serve(s, api, ops.ListArtifacts)
	register(s, api, route{Spec: ops.Spec{
		ID: "getArtifact", Method: http.MethodGet, Path: ops.TasksPath + "/{id}/artifacts/{name...}", Tag: "tasks", Need: ops.Read, Errors: []int{404, 410},
		Summary: "Get an artifact",
		About:   "Finds only names in the list. The ETag is the SHA-256 of the whole file. The file is from a guest: do not let a browser run it.",
	}, ranges: true, content: "application/octet-stream"}, func(ctx context.Context, in *artifactInput) (*bodyOutput, error) {
		t, err := s.engine.Task(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		tag := ""
		for _, a := range t.Status.Artifacts {
			if a.Name == in.Name {
				tag = a.SHA256
			}
		}
		if r, err := s.engine.Stored(ctx, t, ops.File{Task: t.ID, Artifact: in.Name}); r != nil || err != nil {
			return s.download(ctx, r, path.Base(in.Name), tag, time.Time{}, err)
		}
		if err := s.tasks.CheckFiles(t); err != nil {
			return nil, err
		}
		f, err := s.tasks.OpenArtifact(t, in.Name)
		if err != nil {
			return nil, fail.New(fail.NotFound, "%w", err).WithHint("GET %s/%s/artifacts lists them", ops.TasksPath, t.ID)
		}
		return s.file(ctx, f, path.Base(in.Name), tag)
	})
	register(s, api, route{Spec: ops.Spec{
		ID: "getBundle", Method: http.MethodGet, Path: ops.TasksPath + "/{id}/bundle", Tag: "tasks", Need: ops.Read, Errors: []int{404, 410},
		Summary: "Get the whole outbox of an ended task as one file",
	}, ranges: true, content: "application/octet-stream"}, func(ctx context.Context, in *ops.TaskPath) (*bodyOutput, error) {
		t, err := s.engine.TaskWithFiles(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		f, err := os.Open(s.tasks.Dir(t.ID).Bundle())
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fail.New(fail.NotFound, "task %s is %s and has no bundle", t.ID, t.Phase).WithHint("wait until it has ended: GET %s/%s", ops.TasksPath, t.ID)
		}
		if err != nil {
			return nil, err
		}
		return s.file(ctx, f, t.ID+".tar.gz", "")
	})
}

func (s *Server) recordingRoutes(api huma.API) {
	serve(s, api, ops.ListRecordings)
	serve(s, api, ops.SearchRecordings)
	serve(s, api, ops.RemoveRecordings)
	register(s, api, route{Spec: ops.Spec{
		ID: "getRecording", Method: http.MethodGet, Path: ops.RecordingsPath + "/{id}", Tag: "recordings", Need: ops.Read, Errors: []int{404},
		Summary: "Get a recording",
		About:   "It has only text and escape sequences that display something, with secrets redacted. Of a terminal that is being recorded it is what was recorded so far.",
	}, content: "text/plain"}, func(ctx context.Context, in *recordingInput) (*bodyOutput, error) {
		r, err := s.engine.Read(ctx, ops.File{Recording: in.ID, Format: in.Format})
		if err != nil {
			return nil, err
		}
		req := requestOf(ctx)
		return &bodyOutput{func(huma.Context) {
			defer r.Close()
			req.w.Header().Set("Content-Type", textType)
			req.w.WriteHeader(http.StatusOK)
			if req.r.Method == http.MethodHead {
				return
			}
			if _, err := io.Copy(req.w, r); err != nil {
				panic(http.ErrAbortHandler) // the client must not take a part for the whole
			}
		}}, nil
	})
}

// file responds with a file that a guest may have created, as a download under the
// given name. It closes the file.
func (s *Server) file(ctx context.Context, f *os.File, name, sha256 string) (*bodyOutput, error) {
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fail.New(fail.NotFound, "%q is not a regular file", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	body, err := s.download(ctx, f, name, sha256, st.ModTime(), nil)
	if err != nil {
		return nil, err
	}
	send := body.Body
	body.Body = func(c huma.Context) {
		defer f.Close()
		send(c)
	}
	return body, nil
}

// download responds with a file that a guest may have created, as a download under the given name.
func (s *Server) download(ctx context.Context, r io.ReadSeeker, name, sha256 string, modified time.Time, err error) (*bodyOutput, error) {
	if err != nil {
		return nil, err
	}
	req := requestOf(ctx)
	return &bodyOutput{func(huma.Context) {
		h := req.w.Header()
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Content-Disposition", disposition(name))
		if sha256 != "" {
			h.Set("ETag", strconv.Quote(sha256))
			modified = time.Time{} // the ETag identifies the content better
		}
		http.ServeContent(req.w, req.r, "", modified, r)
	}}, nil
}

// storedLog responds with a log of a task of another host, which has ended.
func storedLog(ctx context.Context, r *io.SectionReader, offset int64, err error) (*bodyOutput, error) {
	if err != nil {
		return nil, err
	}
	if err := checkOffset(r.Size(), offset); err != nil {
		return nil, err
	}
	req := requestOf(ctx)
	return &bodyOutput{func(huma.Context) {
		h := req.w.Header()
		h.Set("Content-Type", textType)
		h.Set("X-Log-Size", strconv.FormatInt(r.Size(), 10))
		http.ServeContent(req.w, req.r, "", time.Time{}, io.NewSectionReader(r, offset, r.Size()-offset))
	}}, nil
}

// disposition makes a browser save the response. It encodes the name as RFC 6266
// requires for arbitrary characters.
func disposition(name string) string {
	if text := mime.FormatMediaType("attachment", map[string]string{"filename": name}); text != "" {
		return text
	}
	return "attachment"
}

// sizeFrom returns the size of a log. An offset beyond its end is an error, because
// the client then assumes bytes that do not exist.
func sizeFrom(path string, offset int64) (int64, error) {
	st, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	size := int64(0)
	if err == nil {
		size = st.Size()
	}
	return size, checkOffset(size, offset)
}

func checkOffset(size, offset int64) error {
	if offset > size {
		return problem(http.StatusRequestedRangeNotSatisfiable, codeRange, fmt.Sprintf("continue with offset=%d", size), "the log has %d bytes; offset %d is beyond its end", size, offset)
	}
	return nil
}

// logs responds with one of a subject's two logs.
func (feed eventFeed) logs(ctx context.Context, sub subject, in LogQuery, stdout, stderr string) (*bodyOutput, error) {
	req := requestOf(ctx)
	name := stdout
	if in.Stream == "stderr" {
		name = stderr
	}
	size, err := sizeFrom(name, in.Offset)
	if err != nil {
		return nil, err
	}
	h := req.w.Header()
	if in.Follow {
		if req.r.Header.Get("Range") != "" || req.r.Method == http.MethodHead {
			return nil, fail.New(fail.Usage, "follow cannot be combined with Range or HEAD").WithHint("use offset, or leave follow out")
		}
		st, err := feed.newStream(req, "log", sub, 0)
		if err != nil {
			return nil, err
		}
		return &bodyOutput{func(huma.Context) {
			defer st.close()
			h.Set("Content-Type", textType)
			req.w.WriteHeader(http.StatusOK)
			if req.w.Flush() == nil {
				st.followLog(ctx, req.w, name, in.Offset)
			}
		}}, nil
	}
	var content io.ReadSeeker = io.NewSectionReader(nothing{}, 0, 0)
	var f *os.File
	if size > 0 {
		if f, err = os.Open(name); err != nil {
			return nil, err
		}
		content = io.NewSectionReader(f, in.Offset, size-in.Offset) // with a fixed end, because the log may grow
	}
	return &bodyOutput{func(huma.Context) {
		if f != nil {
			defer f.Close()
		}
		h.Set("Content-Type", textType)
		h.Set("X-Log-Size", strconv.FormatInt(size, 10))
		http.ServeContent(req.w, req.r, "", time.Time{}, content)
	}}, nil
}

type nothing struct{}

func (nothing) ReadAt([]byte, int64) (int, error) { return 0, io.EOF }

// followLog writes a log as it grows, until its subject has ended. If it ends
// early, it aborts the connection, and the client notices the missing last chunk.
func (st *stream) followLog(ctx context.Context, w *response, name string, offset int64) {
	ctx, cancel := context.WithCancel(ctx)
	over, watched := make(chan struct{}), make(chan struct{})
	broken := false
	go func() {
		defer close(watched)
		tick := time.NewTicker(min(time.Second, st.server.limits.Beat))
		defer tick.Stop()
		for {
			done, err := st.of.over(ctx)
			if done {
				close(over)
				return
			}
			if err != nil || !st.server.stillAllowed(st.who, ops.Read) {
				broken = true
				cancel()
				return
			}
			select {
			case <-tick.C:
			case <-st.server.closing:
				broken = true
				cancel()
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	err := logfile.Tail(ctx, name, offset, over, func(_ int64, data []byte) error {
		if _, err := w.Write(data); err != nil {
			return err
		}
		return w.Flush()
	})
	cancel()
	<-watched
	if broken || err != nil {
		panic(http.ErrAbortHandler) // so that the client does not take the log for complete
	}
}
