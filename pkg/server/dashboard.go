package server

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/dashboard"
)

// Paths of the dashboard's pages and of its logins.
const (
	dashboardPath = "/dashboard/"
	sessionPath   = dashboardPath + "session"
	loginPath     = dashboardPath + "login"
	logoutPath    = dashboardPath + "logout"
)

// pageHeaders keep a page from loading or running anything that serve did not send, from being
// shown inside another page, and from being reached by one that opened it.
var pageHeaders = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; " +
		"form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
	"X-Frame-Options":            "DENY",
	"Cross-Origin-Opener-Policy": "same-origin",
	"Cache-Control":              "no-cache", // asks each time whether the file has changed
	"Permissions-Policy":         "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}

// isPage reports whether a request is for a file of the dashboard. These hold nothing that
// needs a login.
func isPage(r *http.Request) bool {
	p := r.URL.Path
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && p != sessionPath && (p == "/" || p+"/" == dashboardPath || strings.HasPrefix(p, dashboardPath))
}

// opensPage reports whether the user goes to the dashboard in a tab of the browser, by a link
// on another site or in a file.
func opensPage(r *http.Request) bool {
	return isPage(r) && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// pageFile is a file of the dashboard, as it is sent.
type pageFile struct {
	kind          string
	tag           string // ETag
	plain, packed []byte // packed is nil if compression does not help
}

// pageKinds has the content types of the pages' files. The host's own list may differ.
var pageKinds = map[string]string{
	".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml", ".png": "image/png", ".woff2": "font/woff2", ".json": "application/json",
}

// pages returns the dashboard's files by name.
var pages = sync.OnceValues(func() (map[string]pageFile, error) { return readPages(dashboard.Files()) })

func readPages(files fs.FS) (map[string]pageFile, error) {
	all := map[string]pageFile{}
	err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasPrefix(path.Base(name), ".") {
			return err
		}
		p := pageFile{kind: cmp.Or(pageKinds[path.Ext(name)], "application/octet-stream")}
		if p.plain, err = fs.ReadFile(files, name); err != nil {
			return err
		}
		p.tag = fmt.Sprintf("%q", fmt.Sprintf("%x", sha256.Sum256(p.plain)))
		var b bytes.Buffer
		w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
		if err != nil {
			return err
		}
		if _, err = w.Write(p.plain); err == nil {
			err = w.Close()
		}
		if b.Len() < len(p.plain)*9/10 {
			p.packed = b.Bytes()
		}
		all[name] = p
		return err
	})
	return all, err
}

// servePage responds with a file of the dashboard.
func (s *Server) servePage(w http.ResponseWriter, r *http.Request) {
	req := requestOf(r.Context())
	if req.at.isAmbiguous(r.Host) {
		http.Redirect(w, r, req.at.base()+r.URL.Path, http.StatusFound)
		return
	}
	all, err := pages()
	if err != nil {
		req.w.fail(s.problemOf(r.Context(), err))
		return
	}
	name := r.PathValue("name")
	if name == "" {
		name = dashboard.Index
	}
	p, ok := all[name]
	if !ok {
		req.w.fail(problem(http.StatusNotFound, "NOT_FOUND", "open "+dashboardPath, "no such page"))
		return
	}
	h := w.Header()
	for key, value := range pageHeaders {
		h.Set(key, value)
	}
	h.Set("Content-Type", p.kind)
	h.Set("Vary", "Accept-Encoding")
	h.Set("ETag", p.tag)
	content := p.plain
	if p.packed != nil && r.Header.Get("Range") == "" && acceptsGzip(r.Header.Get("Accept-Encoding")) {
		h.Set("ETag", strings.TrimSuffix(p.tag, `"`)+`-gz"`)
		h.Set("Content-Encoding", "gzip")
		content = p.packed
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

func acceptsGzip(header string) bool {
	for coding := range strings.SplitSeq(header, ",") {
		name, weight, _ := strings.Cut(coding, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") && !strings.HasSuffix(strings.ReplaceAll(weight, " ", ""), "q=0") {
			return true
		}
	}
	return false
}
