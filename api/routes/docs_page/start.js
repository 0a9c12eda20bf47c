"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null, // Swagger's own would send the document's address to its site.
});
