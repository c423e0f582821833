// The command goclient requests a URL with a bearer token, over HTTP/2 or, with -1, HTTP/1.1.
package main

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	old := flag.Bool("1", false, "HTTP/1.1")
	flag.Parse()
	r, err := http.NewRequest(http.MethodGet, flag.Arg(0), nil)
	if err == nil {
		r.Header.Set("Authorization", "Bearer "+os.Getenv("OTHER"))
		var p http.Protocols
		p.SetHTTP1(*old)
		p.SetHTTP2(!*old)
		var a *http.Response
		if a, err = (&http.Client{Transport: &http.Transport{Protocols: &p}}).Do(r); err == nil {
			_, err = io.Copy(os.Stdout, a.Body)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
